// One translation unit: PyTorch's headers take longer to read than all that is here to compile.

#include "accumulate.cpp"
#include "walk/guards.cpp"
#include "hosted.cpp"
#include "walk/plan.cpp"
#include "walk/walk.cpp"

#include "peek.cpp"
#include "taken.cpp"

#include "fast_path/readers.cpp"
#include "fast_path/places.cpp"
#include "fast_path/questions.cpp"
#include "fast_path/hit.cpp"
#include "fast_path/serve.cpp"
#include "fast_path/skip.cpp"
#include "fast_path/entry.cpp"

#include "own_loop/tape_in_order.cpp"
#include "own_loop/loop.cpp"

#include "module.cpp"
