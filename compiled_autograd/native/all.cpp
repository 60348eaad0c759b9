// One translation unit: PyTorch's headers take longer to read than all that is here to compile.

#include "accumulate.cpp"
#include "guards.cpp"
#include "hosted.cpp"
#include "plan.cpp"
#include "walk.cpp"

#include "taken.cpp"

#include "fast_path/readers.cpp"
#include "fast_path/questions.cpp"
#include "fast_path/hit.cpp"
#include "fast_path/serve.cpp"
#include "fast_path/entry.cpp"

#include "own_loop/tape_in_order.cpp"
#include "own_loop/loop.cpp"

#include "module.cpp"
