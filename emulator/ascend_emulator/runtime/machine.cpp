// Running tasks: queues, waits, replay. See machine.h.
#include "machine.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <unistd.h>
#include <utility>

#include "acl/acl.h"

namespace emulator {
thread_local int thread_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
namespace {
thread_local std::string recent;

bool ready(const Task &task) {
  return task.event->external ? task.event->set : task.event->completed >= task.ticket;
}

void execute_event(Task &task, const Stream *stream) {
  Event *event = task.event;
  if (task.kind == Kind::record) {
    event->failure = stream->failure;
    event->set = true;
    event->nanoseconds = now();
    if (task.ticket > event->completed) event->completed = task.ticket;
  } else if (task.kind == Kind::reset) {
    event->set = false;
  }
}

// By stream, how many of its first tasks must end before the first `count` of this one can, events' ways included.
void need(const Stream *stream, size_t count, std::map<const Stream *, size_t> &needed) {
  size_t &known = needed[stream], from = known;
  if (count <= known) return;
  known = count;
  auto recorded = [&](const Task &wait) {
    if (wait.kind != Kind::wait || ready(wait)) return;
    for (const Stream *other : machine().pending)
      for (size_t i = 0; i < other->queue.size(); i++) {
        const Task &task = other->queue[i];
        if (task.kind == Kind::record && task.event == wait.event && task.ticket >= wait.ticket) need(other, i + 1, needed);
      }
  };
  for (size_t i = from; i < count; i++) {
    const Task &task = stream->queue[i];
    recorded(task);
    if (task.kind == Kind::replay)
      for (size_t step = task.position; step < task.graph->tasks.size(); step++) recorded(task.graph->tasks[step]);
  }
}

// With the defect late-replays a replay begins when a host thread waits for it: other streams overtake it.
bool held(const Task &task, const Stream *stream) {
  static const bool late = has_defect("late-replays");
  if (!late || task.kind != Kind::replay) return false;
  std::map<const Stream *, size_t> needed;
  for (const Stream *waiter : machine().waiting) need(waiter, waiter->queue.size(), needed);
  return !needed.count(stream);
}

// With the defect first-replay, the first replay of a graph with updated tasks loses the results of its last kernel.
bool lost(const Graph &graph, size_t position) {
  static const bool loses = has_defect("first-replay");
  if (!loses || graph.replays || graph.groups.empty()) return false;
  for (size_t later = position + 1; later < graph.tasks.size(); later++)
    if (graph.tasks[later].kind == Kind::kernel) return false;
  return true;
}

// One kernel or piece of work, without the mutex.
int execute(Lock &lock, const Task &task, int graph, int stream) {
  uint64_t call = task.call;
  std::function<int()> work = task.work;
  bool kernel = task.kind == Kind::kernel;
  lock.unlock();
  int code = kernel ? (machine().execute ? machine().execute(call, graph, stream) : kernel_failed) : work();
  lock.lock();
  return code;
}

// Replays from where it stopped; false when it waits for an event that is not recorded yet.
bool replay(Lock &lock, Stream *stream, Task &task, int &code) {
  Graph &graph = *task.graph;
  graph.executing = true;
  while (task.position < graph.tasks.size()) {
    Task &step = graph.tasks[task.position];
    if (step.kind == Kind::wait) {
      if (!ready(step)) return false;
    } else if (step.kind == Kind::record || step.kind == Kind::reset) {
      execute_event(step, stream);
    } else {
      code = execute(lock, step, lost(graph, task.position) ? -graph.id : graph.id, stream->id);
      if (code) break;
    }
    task.position++;
    machine().steps++;
  }
  graph.executing = false;
  graph.replays++;
  return true;
}

void update(Task &task) {
  Graph &graph = *task.group->graph;
  std::vector<Task> old;
  for (size_t i = 0; i < task.calls.size(); i++) {
    Task &target = graph.tasks[task.group->tasks[i]];
    old.push_back(target);
    target.call = task.calls[i];
  }
  if (machine().forget)
    for (auto &gone : old) machine().forget(gone.call);
}
}  // namespace

Machine &machine() {
  static Machine *instance = new Machine;  // never destroyed: threads may outlive static objects
  return *instance;
}

int submit_work(Stream *stream, std::function<int()> work) {
  Task task{Kind::work};
  task.work = std::move(work);
  return submit(stream, std::move(task));
}

int submit(Stream *stream, Task task) {
  Lock lock(machine().mutex);
  if (stream->capture) {
    Capture &capture = *stream->capture;
    advance(capture, stream);
    if (capture.group) {
      if (stream != capture.group->stream) return refuse(lock, stream->capture, group_interrupted, "a task of another stream inside a task group [R85]");
      capture.group->tasks.push_back(capture.graph->tasks.size());
    }
    capture.graph->tasks.push_back(std::move(task));
    return ok;
  }
  if (stream->updating) {
    if (task.kind != Kind::kernel) return fail(cannot_update, "a task update holds operators only [R86]");
    stream->update_calls.push_back(task.call);
    return ok;
  }
  stream->queue.push_back(std::move(task));
  machine().pending.insert(stream);
  return pump(lock, stream);
}

// Runs what can run, on all streams. Returns the error of a task of `mine`; those of others stay with their stream.
int pump(Lock &lock, Stream *mine) {
  int result = 0;
  bool progress = true;
  while (progress) {
    progress = false;
    std::vector<Stream *> pending(machine().pending.begin(), machine().pending.end());
    for (Stream *stream : pending) {
      while (machine().pending.count(stream) && !stream->running && !stream->queue.empty()) {
        Task &task = stream->queue.front();
        int code = 0;
        if ((task.kind == Kind::wait && !ready(task)) || held(task, stream)) break;
        stream->running = true;
        if (task.kind == Kind::update) {
          lock.unlock();  // Python is told to forget
          update(task);
          lock.lock();
        } else if (task.kind == Kind::replay) {
          if (!replay(lock, stream, task, code)) {
            stream->running = false;
            break;
          }
        } else if (task.kind == Kind::record || task.kind == Kind::reset) {
          execute_event(task, stream);
        } else if (task.kind == Kind::wait) {
          if (!stream->failure.code) stream->failure = task.event->failure;
        } else {
          code = execute(lock, task, 0, stream->id);
        }
        stream->queue.pop_front();
        stream->running = false;
        machine().steps++;
        progress = true;
        if (code && stream == mine && !result) result = code;
        else if (code && !stream->failure.code) stream->failure = {code, recent};
      }
      if (stream->queue.empty()) machine().pending.erase(stream);
    }
  }
  machine().changed.notify_all();
  return result;
}

int drain(Lock &lock, Stream *stream) {
  static const double patience = atof(setting("HANG_SECONDS", "10"));
  // An allocation that does not fit waits for the device and frees what is cached; the operator is not yet launched.
  if (stream->launching == std::this_thread::get_id()) return 0;
  Waiting until_the_end(stream);
  uint64_t seen = machine().steps;
  auto since = std::chrono::steady_clock::now();
  while (stream->running || !stream->queue.empty()) {
    int code = pump(lock, stream);
    if (code) return code;
    if (!stream->running && stream->queue.empty()) break;
    machine().changed.wait_for(lock, std::chrono::milliseconds(20));
    auto time = std::chrono::steady_clock::now();
    if (machine().steps != seen) seen = machine().steps, since = time;
    if (std::chrono::duration<double>(time - since).count() > patience) {
      bool replaying = !stream->queue.empty() && stream->queue.front().kind == Kind::replay;
      return fail(sync_timeout, std::string("deadlock: stream ") + std::to_string(stream->id) +
                  (replaying ? " replays a graph that waits for an external event which nobody records"
                             : " waits for an event which nobody records") + "; the real device hangs here [R86]");
    }
  }
  return tell(std::exchange(stream->failure, {}));
}

int fail(int code, const std::string &text) {
  recent = "EE9999: " + std::to_string(code) + ": " + text;
  return code;
}

int tell(const Failure &failure) {
  if (failure.code) recent = failure.text;
  return failure.code;
}

int refuse(Lock &lock, std::shared_ptr<Capture> capture, int code, const std::string &text) {
  if (capture && capture->broken.empty()) capture->broken = std::to_string(code) + ": " + text;
  return fail(code, text);
}

std::shared_ptr<Capture> forbidding_capture() {
  if (thread_mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) return nullptr;
  for (auto &capture : machine().captures)
    if (capture->mode == 0 || (capture->mode == 1 && capture->thread == std::this_thread::get_id())) return capture;
  return nullptr;
}

void forget(const std::vector<Task> &tasks) {
  if (machine().forget)
    for (auto &task : tasks)
      if (task.kind == Kind::kernel) machine().forget(task.call);
}

uint64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000ull + time.tv_nsec;
}

const char *setting(const char *name, const char *otherwise) {
  const char *value = getenv((std::string("ASCEND_EMULATOR_") + name).c_str());
  return value && *value ? value : otherwise;
}

bool strict() {
  static const bool value = strcmp(setting("STRICT", "1"), "0") != 0;
  return value;
}

bool has_defect(const char *name) {
  return ("," + std::string(setting("DEFECTS", "")) + ",").find("," + std::string(name) + ",") != std::string::npos;
}

static int trace_file() {
  static int file = [] {
    const char *path = setting("TRACE", "");
    return *path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
  }();
  return file;
}

bool tracing() { return trace_file() >= 0; }

void trace(const std::string &fields) {
  if (!tracing()) return;
  std::string line = "{\"pid\": " + std::to_string(getpid()) + ", \"time\": " + std::to_string(now()) + ", " + fields + "}\n";
  if (write(trace_file(), line.data(), line.size()) < 0) return;
}
}  // namespace emulator

using namespace emulator;
extern "C" {
void emulator_not_implemented(const char *symbol) { fail(500099, std::string("the emulated NPU does not implement ") + symbol); }
const char *aclGetRecentErrMsg() { return recent.c_str(); }
void emulator_set_error(const char *text) { recent = text; }
void emulator_set_hooks(execute_hook execute, forget_hook forget) { machine().execute = execute, machine().forget = forget; }
void emulator_trace(const char *fields) { trace(fields); }
int emulator_tracing() { return tracing(); }
}
