// One translation unit: PyTorch's headers take longer to read than all that is here to compile.

#include "guards.cpp"
#include "plan.cpp"
#include "walk.cpp"

#include "module.cpp"
