// One translation unit: PyTorch's headers take longer to read than all that is here to compile.

#include "accumulate.cpp"
#include "guards.cpp"
#include "hosted.cpp"
#include "plan.cpp"
#include "walk.cpp"

#include "taken.cpp"

#include "module.cpp"
