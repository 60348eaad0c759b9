// A hit that Python has served and that may repeat: the plan of its tape, the program that ran, and the questions.
// It keeps neither the structure nor the variant alive, and nothing that it keeps leads back to it.

#pragma once

#include "../peek.h"
#include "../taken.h"
#include "questions.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace native {

class Plan;

class FastHit {
 public:
  // See `Module.fast_hit` in interface.py. Throws PythonError.
  explicit FastHit(PyObject* arguments);

  bool is_for(PyObject* settings) const { return settings_.get() == settings; }
  // Whether it may serve tapes of that other one's plan, under the same settings, with shapes of that number.
  bool serves(const FastHit& other, int shapes) const {
    return plan == other.plan && is_for(other.settings_.get()) && shapes_ == shapes;
  }

  // Whether the tape of some outputs has a key among those that Python watches, or none that is known here. Throws
  // PythonError.
  bool is_watched(PyObject* outputs) const;
  // While the tape is whole: the structure, if Python would have it walked with this plan; else null. Throws
  // PythonError.
  //
  // asked: another one whose questions were asked just now, and had their answers; or null.
  Owned structure_to_walk(const FastHit* asked) const;
  // Once it is taken: the variant, if its program would be run without more; else null. Throws PythonError.
  Owned variant_to_run(PyObject* structure) const;

  Plan* plan;
  const HostedProgram* program;
  // Functions of Python: what goes on with a tape that was taken and is not run here; what asks whether leaves may be
  // written; what writes those that C++ leaves. And what counts hits.
  Owned hand_over, may_write, write, counter;
  mutable const FastHit* next = nullptr;  // what served the backward after this one's: it may be gone

 private:
  int shapes_;
  uint64_t keys_included_, keys_excluded_;  // of the thread, when Python has served it
  Owned plan_object_, program_object_, settings_, structure_, variant_;
  unsigned long long number_;  // of the settings: see `peek`
  Owned watched_;              // a dictionary of keys
  Questions before_, after_;   // those before the walk, and those before the run
  Owned before_list_;          // one object, where they are the same as another hit's
};

// fast_hit(...) -> FastHit
PyObject* new_fast_hit(PyObject*, PyObject* arguments);

bool is_fast_hit(PyObject* object);
// Of a `FastHit` of Python's.
const FastHit& fast_hit_of(PyObject* object);

bool make_class_of_fast_hits();

// ---- objects of Python ----------------------------------------------------------------------------------------------

// An attribute. Throws PythonError.
Owned attribute(PyObject* object, PyObject* name);
// Add to an attribute that is a number. Throws PythonError.
void add_to(PyObject* object, PyObject* name, PyObject* number);

// Names of attributes, made once.
struct Names {
  PyObject *depth, *evicted, *here, *hits, *left, *met, *ran, *saving, *settings, *stack, *used, *variants;
  PyObject *backwards, *last, *started, *stats, *told, *hit_times;
  PyObject* left_to_eager;
};
const Names& names();

}  // namespace native
