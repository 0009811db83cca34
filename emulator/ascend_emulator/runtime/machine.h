// The emulated device: streams, events and graphs of AscendCL over host memory.
//
// A stream is a queue of tasks. A task that can run is run at once, in the thread that submitted it; a stream is held up
// only by a wait for an event, and everything behind it queues. Graphs are lists of recorded tasks. Kernels live in
// Python and are known here by a number. What real hardware does and this does not: run anything in parallel, take time,
// overlap copies with kernels. Order is that of the real machine, so a race on the real machine may not show here.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace emulator {

// error codes of rt_error_codes.h (8.5.0 for those of capture)
enum Code : int {
  ok = 0, invalid_parameter = 107000, invalid_device = 107001, no_context = 107002, sync_timeout = 107020,
  capture_dependency = 107024, capture_unjoined = 107025, model_captured = 107026, stream_captured = 107027,
  event_captured = 107028, stream_not_captured = 107029, not_on_captured_stream = 107030, capture_interdependent = 107032,
  group_status = 107033, group_interrupted = 107034, capture_not_here = 107036, model_running = 107037,
  capture_other_thread = 107038, out_of_memory = 207001, no_stream = 207008, cannot_update = 207019,
  kernel_failed = 507015,
};

struct Stream;
struct Event;
struct Graph;
struct Capture;
struct Group;

enum class Kind { kernel, work, record, wait, reset, replay, update };

struct Task {
  Kind kind;
  uint64_t call = 0;                 // kernel: its number in Python
  std::function<int()> work;         // work: copy, fill, callback, collective
  Event *event = nullptr;            // record, wait, reset
  uint64_t ticket = 0;               // record, wait: which recording of the event
  std::shared_ptr<Graph> graph;      // replay
  size_t position = 0;               // replay: the next task of the graph
  Group *group = nullptr;            // update
  std::vector<uint64_t> calls;       // update: the new calls
};

struct Failure { int code = ok; std::string text; };

struct Stream {
  int id = 0, device = 0;
  std::deque<Task> queue;
  bool running = false;              // a task of it is being executed by some thread
  std::thread::id launching;         // of the thread that runs an operator on it at once, for which it may allocate
  Failure failure;                   // of a task that nobody was waiting for; told by the next synchronisation
  std::shared_ptr<Capture> capture;
  Group *updating = nullptr;
  std::vector<uint64_t> update_calls;
  bool overflow = false;
};

struct Event {
  int id = 0;
  bool external = false, set = false;      // external events are flags: wait blocks until set, reset clears
  uint64_t issued = 0, completed = 0;      // others count recordings
  uint64_t nanoseconds = 0;
  Failure failure;                         // of its stream before it was recorded last: told to all that wait for it
  std::shared_ptr<Capture> capture;        // the capture in which it was recorded last
  std::map<Stream *, uint64_t> clock;      // what it stands behind there
};

struct Group { Graph *graph; Stream *stream; std::vector<size_t> tasks; };

struct Graph {
  int id = 0, device = 0;
  std::vector<Task> tasks;
  std::set<Stream *> streams;
  std::vector<std::unique_ptr<Group>> groups;
  bool executing = false;
  uint64_t replays = 0;                    // that have ended
};

struct Capture {
  std::shared_ptr<Graph> graph;
  Stream *origin = nullptr;
  int mode = 0;
  std::thread::id thread;
  bool active = true;
  std::string broken;                      // why it cannot end well: the first illegal action
  std::map<Stream *, uint64_t> last;       // number of tasks that each stream has put in
  std::map<Stream *, std::map<Stream *, uint64_t>> clocks;
  Group *group = nullptr;
};

typedef int (*execute_hook)(uint64_t call, int graph, int stream);  // graph: 0 outside of a replay; negative: spoil it
typedef void (*forget_hook)(uint64_t call);

struct Machine {
  std::mutex mutex;
  std::condition_variable changed;
  std::set<Stream *> streams, pending;
  std::set<Graph *> graphs;
  std::set<Group *> groups;
  std::vector<std::shared_ptr<Capture>> captures;
  uint64_t steps = 0;
  std::multiset<Stream *> waiting;         // for which host threads wait
  execute_hook execute = nullptr;
  forget_hook forget = nullptr;
};

Machine &machine();
typedef std::unique_lock<std::mutex> Lock;
struct Waiting {  // needs the mutex when it begins and ends
  explicit Waiting(Stream *stream) : mine(machine().waiting.insert(stream)) {}
  ~Waiting() { machine().waiting.erase(mine); }
  std::multiset<Stream *>::iterator mine;
};

// The number of the device of this thread, or -1.
int current_device();
Stream *stream_of(void *handle);                     // null handle: the default stream of the current device
int submit(Stream *stream, Task task);               // runs, queues, records or adds to an update
int submit_work(Stream *stream, std::function<int()> work);
int drain(Lock &lock, Stream *stream);               // waits until the stream is empty; sync_timeout when it hangs
bool started(const Event *event, uint64_t ticket);
int pump(Lock &lock, Stream *mine);

int fail(int code, const std::string &text);         // sets the recent error message and returns the code
int tell(const Failure &failure);                    // likewise, in another thread than it happened in
int refuse(Lock &lock, std::shared_ptr<Capture> capture, int code, const std::string &text);  // and breaks the capture
extern thread_local int thread_mode;                 // relaxed: this thread may do what a capture forbids
std::shared_ptr<Capture> forbidding_capture();       // one that forbids unsafe calls of this thread; needs the mutex
void advance(Capture &capture, Stream *stream);
void forget(const std::vector<Task> &tasks);
uint64_t now();
void trace(const std::string &fields);               // one JSON line, if tracing
bool tracing();
bool strict();
bool has_defect(const char *name);                   // of defects.py
const char *setting(const char *name, const char *otherwise);  // ASCEND_EMULATOR_<name>

bool is_device(const void *pointer, size_t bytes);
bool is_pinned(const void *pointer);
int reserve(long bytes);                             // counts as used on the current device, and takes nothing; negative: given back
}  // namespace emulator
int emulator_take_stream(int device);  // no_stream when the budget of the device is spent; needs the mutex
namespace emulator {
}  // namespace emulator
