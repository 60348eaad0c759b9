#include "serve.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>

namespace native {

namespace {

constexpr size_t kMaxTried = 16;  // plans that a tape is compared with: most differ at its first node
constexpr long kMaxHits = 2048;   // whose times a session keeps, as `report/step_log.py` does and reads
constexpr Py_ssize_t kHitSize = 4 * sizeof(double), kTimesSize = kMaxHits * kHitSize;

// The session that the calling thread is in; null where there is none, or something is under way in it.
Owned session_of(const FastPathState& path) {
  const Owned here = attribute(path.thread, names().here), depth = attribute(here.get(), names().depth);
  const Owned stack = attribute(here.get(), names().stack);
  if (PyObject_IsTrue(depth.get()) || !PyList_Check(stack.get()) || !PyList_GET_SIZE(stack.get())) return nullptr;
  PyObject* session = PyList_GET_ITEM(stack.get(), PyList_GET_SIZE(stack.get()) - 1);
  if (session == Py_None || attribute(session, names().left).get() != Py_None) return nullptr;
  return Owned(Py_NewRef(session));
}

// One hit, from the moment when its tape is taken.
class Run {
 public:
  Run(FastPathState& path, const FastHit& hit, PyObject* session, PyObject* structure, PyObject* variant)
      : path_(path), hit_(hit), session_(session), structure_(structure), variant_(variant) {}

  // The seconds that it took in all; says as soon as the session knows of it. Throws PythonError.
  double go(PyObject* taken, const Asked& asked, bool& is_counted) {
    count_use();
    const double begun = seconds();
    const Owned result(or_error([&] { return run(taken); }));
    const double ended = seconds();
    const ErrorKept error;
    if (result) {
      add_to(variant_, names().hits, Owned(checked(PyLong_FromLong(1))).get());
      add_to(variant_, names().ran, Owned(checked(PyFloat_FromDouble(ended - asked.started))).get());
    }
    count(asked.started, begun - asked.started, ended - begun);
    if (asked.account && PyObject_SetAttr(asked.account, names().told, Py_True) < 0) throw PythonError();
    is_counted = true;
    if (!result) throw PythonError();
    return ended - asked.started;
  }

 private:
  PyObject* run(PyObject* taken) {
    const at::AutoGradMode off(false);
    Owned left(checked(run_taken(taken, *hit_.program, hit_.may_write.get())));
    return left.get() == Py_None ? left.release() : checked(PyObject_Call(hit_.write.get(), left.get(), nullptr));
  }

  void count_use() {
    const Owned one(checked(PyLong_FromLong(1))), use(checked(PyIter_Next(path_.uses)));
    add_to(structure_, names().met, one.get());
    add_to(hit_.counter.get(), names().hits, one.get());
    for (PyObject* used : {structure_, variant_})
      if (PyObject_SetAttr(used, names().used, use.get()) < 0) throw PythonError();
  }

  // As `Session.record` does. Nothing of Python's runs from the first line on that counts.
  void count(double started, double walk, double run) {
    const Owned last(checked(Py_BuildValue("(Odd)", structure_, walk, run)));
    const Owned stats = attribute(session_, names().stats), one(checked(PyLong_FromLong(1)));
    const long number = PyLong_AsLong(attribute(stats.get(), names().backwards).get()) + 1;
    const Owned times = hit_times(number);
    add_to(stats.get(), names().hits, one.get());
    add_to(stats.get(), names().backwards, one.get());
    if (PyObject_SetAttr(session_, names().last, last.get()) < 0) throw PythonError();
    if (PyByteArray_CheckExact(times.get()) && PyByteArray_GET_SIZE(times.get()) == kTimesSize) {
      const double hit[] = {static_cast<double>(number), started, walk, run};
      std::memcpy(PyByteArray_AS_STRING(times.get()) + (number % kMaxHits) * kHitSize, hit, kHitSize);
    }
    ++path_.served;
  }

  // Where the session keeps times of hits; None at its first backward.
  Owned hit_times(long number) {
    Owned times = attribute(session_, names().hit_times);
    if (times.get() != Py_None || number == 1) return times;
    times.reset(checked(PyByteArray_FromStringAndSize(nullptr, kTimesSize)));
    std::memset(PyByteArray_AS_STRING(times.get()), 0, kTimesSize);
    if (PyObject_SetAttr(session_, names().hit_times, times.get()) < 0) throw PythonError();
    return times;
  }

  FastPathState& path_;
  const FastHit& hit_;
  PyObject *session_, *structure_, *variant_;
};

// Record in the session a backward that ended before anything ran, by the error that is set. The error stays set.
void tell_of_end(const FastPathState& path, PyObject* session, double started) {
  ErrorKept error;
  const Owned when(checked(PyFloat_FromDouble(started)));
  const Owned told(
      checked(PyObject_CallFunctionObjArgs(path.interrupted, session, when.get(), error.value(), nullptr)));
}

// The known hits: first the one that came next last time, since tapes often alternate, then the others.
std::vector<const FastHit*> likely_first(const FastPathState& path, PyObject* hits) {
  std::vector<const FastHit*> all;
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(hits); ++index)
    all.push_back(&fast_hit_of(PyTuple_GET_ITEM(hits, index)));
  const auto last = std::find(all.begin(), all.end(), path.last);
  const auto next = last == all.end() ? last : std::find(all.begin(), all.end(), (*last)->next);
  if (next != all.end()) std::rotate(all.begin(), next, next + 1);
  return all;
}

// One backward, for the session that the thread is in.
class Serving {
 public:
  Serving(FastPathState& path, const Asked& asked) : path_(path), asked_(asked), session_(session_of(path)) {}

  Served serve() {
    if (!session_) return {};
    try {
      Served served = find();
      served.session = std::move(session_);
      return served;
    } catch (const PythonError&) {
      if (!is_counted_ && !asked_.account) tell_of_end(path_, session_.get(), asked_.started);
      throw;
    }
  }

 private:
  Served find() {
    const Owned settings = attribute(session_.get(), names().settings);
    const Owned hits(Py_NewRef(path_.hits));  // walks and runs let others put other ones in their place
    const std::vector<const FastHit*> likely = likely_first(path_, hits.get());
    std::vector<const Plan*> tried;
    const FastHit* asked = nullptr;
    for (const FastHit* hit : likely) {
      if (!hit->is_for(settings.get()) || std::find(tried.begin(), tried.end(), hit->plan) != tried.end()) continue;
      if (tried.size() == kMaxTried) return {};
      if (tried.empty() && !asked_.account && hit->is_watched(asked_.call.outputs)) return {};
      const Owned structure = hit->structure_to_walk(asked);
      if (!structure) continue;
      asked = hit;
      tried.push_back(hit->plan);
      Owned taken(checked(take_tape(*hit->plan, asked_.call, asked_.keeps)));
      if (!is_taken(taken.get())) continue;
      Served served = run(likely, *hit, structure.get(), taken.get());
      if (served.variant) return served;
      served.taken = std::move(taken);
      served.hand_over.reset(Py_NewRef(hit->hand_over.get()));
      return served;
    }
    return {};
  }

  // With a hit for the shapes at hand, if there is one whose program is to be run.
  Served run(const std::vector<const FastHit*>& all, const FastHit& taken_by, PyObject* structure, PyObject* taken) {
    Served served;
    const int shapes = shapes_of(taken);
    for (const FastHit* hit : all) {
      if (!hit->serves(taken_by, shapes)) continue;
      served.variant = hit->variant_to_run(structure);
      if (!served.variant) continue;
      Run one(path_, *hit, session_.get(), structure, served.variant.get());
      served.seconds = one.go(taken, asked_, is_counted_);
      const auto last = std::find(all.begin(), all.end(), path_.last);
      if (last != all.end()) (*last)->next = hit;
      path_.last = hit;
      break;
    }
    return served;
  }

  FastPathState& path_;
  const Asked& asked_;
  Owned session_;
  bool is_counted_ = false;
};

}  // namespace

Served serve(FastPathState& path, const Asked& asked) { return Serving(path, asked).serve(); }

}  // namespace native
