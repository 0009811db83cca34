// aclmdlRI: graphs. Capture records tasks and runs none of them. The order of recording is kept as the order of replay: it
// satisfies every dependency between captured streams. Real hardware may run forked streams in parallel.
#include "machine.h"

#include <algorithm>

#include "acl/acl.h"
#include "acl/acl_mdl.h"
#include "acl/acl_rt.h"

using namespace emulator;

namespace {
std::map<Graph *, std::shared_ptr<Graph>> handles;

void trace_graph(const char *what, const Graph &graph, const Stream *stream) {
  if (tracing())
    trace(std::string("\"event\": \"graph\", \"what\": \"") + what + "\", \"graph\": " + std::to_string(graph.id) +
          ", \"tasks\": " + std::to_string(graph.tasks.size()) + ", \"stream\": " + std::to_string(stream ? stream->id : -1));
}

void leave(Capture &capture) {  // needs the mutex
  capture.active = false;
  for (Stream *stream : machine().streams)
    if (stream->capture.get() == &capture) stream->capture = nullptr;
  auto &all = machine().captures;
  all.erase(std::remove_if(all.begin(), all.end(), [&](auto &other) { return other.get() == &capture; }), all.end());
}
}  // namespace

namespace emulator {
void advance(Capture &capture, Stream *stream) { capture.clocks[stream][stream] = ++capture.last[stream]; }
}  // namespace emulator

extern "C" {
aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode) {
  static int ids = 1;
  if (std::string(setting("TASK_QUEUE", "")) == "2") return fail(not_on_captured_stream, "capture with TASK_QUEUE_ENABLE=2; use 1 or 0 [R81]");
  if (!handle) return fail(not_on_captured_stream, "the default stream cannot be captured [R81]");
  Stream *stream = stream_of(handle);
  Lock lock(machine().mutex);
  if (stream->capture) return refuse(lock, stream->capture, stream_captured, "the stream is being captured already [R81]");
  if (stream->updating) return fail(group_status, "a capture begins inside a task update [R86]");
  int code = emulator_take_stream(stream->device);
  if (code) return code;
  auto capture = std::make_shared<Capture>();
  capture->graph = std::make_shared<Graph>();
  capture->graph->id = ids++, capture->graph->device = stream->device;
  capture->graph->streams.insert(stream);
  capture->origin = stream, capture->mode = mode, capture->thread = std::this_thread::get_id();
  machine().captures.push_back(capture);
  machine().graphs.insert(capture->graph.get());
  stream->capture = capture;
  trace_graph("begin", *capture->graph, stream);
  return ok;
}

aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus *status, aclmdlRI *model) {
  Stream *stream = stream_of(handle);
  Lock lock(machine().mutex);
  *status = !stream || !stream->capture ? ACL_MODEL_RI_CAPTURE_STATUS_NONE
            : stream->capture->broken.empty() ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED;
  *model = stream && stream->capture ? stream->capture->graph.get() : nullptr;
  return ok;
}

aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI *model) {
  Stream *stream = stream_of(handle);
  Lock lock(machine().mutex);
  auto capture = stream->capture;
  *model = nullptr;
  if (!capture) return fail(stream_not_captured, "the capture of a stream ends that is not being captured [R81]");
  if (stream != capture->origin) return refuse(lock, capture, capture_not_here, "a capture ends on another stream than it began on [R81]");
  if (capture->mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED && capture->thread != std::this_thread::get_id())
    return refuse(lock, capture, capture_other_thread, "a capture ends in another thread than it began in [R81]");
  int code = ok;
  if (!capture->broken.empty()) code = fail(capture_unjoined, "the capture was broken by " + capture->broken);
  else if (capture->group) code = fail(group_status, "a capture ends inside a task group [R85]");
  else
    for (auto &other : capture->last)
      if (capture->clocks[stream][other.first] < other.second)
        code = fail(capture_unjoined, "stream " + std::to_string(other.first->id) + " was forked from the capture and not joined before its end [R84]");
  leave(*capture);
  trace_graph("end", *capture->graph, stream);
  if (code) {
    machine().graphs.erase(capture->graph.get());
    std::vector<Task> tasks = capture->graph->tasks;
    lock.unlock();
    forget(tasks);
    return code;
  }
  handles[capture->graph.get()] = capture->graph;
  *model = capture->graph.get();
  return ok;
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode) {
  int before = thread_mode;
  thread_mode = *mode, *mode = (aclmdlRICaptureMode)before;
  return ok;
}

aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream handle) {
  Stream *stream = stream_of(handle);
  Task task{Kind::replay};
  {
    Lock lock(machine().mutex);
    auto graph = handles.find((Graph *)model);
    if (graph == handles.end()) return fail(invalid_parameter, "a graph is replayed that does not exist [R81]");
    if (stream->capture) return refuse(lock, stream->capture, stream_captured, "a graph is replayed on a stream that is being captured [R82]");
    if (graph->second->executing && (stream->queue.empty() || stream->queue.front().graph != graph->second))
      return fail(model_running, "a graph is replayed on a second stream while it runs");
    task.graph = graph->second;
    trace_graph("replay", *task.graph, stream);
  }
  return submit(stream, std::move(task));
}

aclError aclmdlRIDestroy(aclmdlRI model) {
  std::vector<Task> tasks;
  {
    Lock lock(machine().mutex);
    auto graph = handles.find((Graph *)model);
    if (graph == handles.end()) return fail(invalid_parameter, "a graph is destroyed that does not exist");
    tasks = graph->second->tasks;
    for (auto &group : graph->second->groups) machine().groups.erase(group.get());
    machine().graphs.erase(graph->first);
    handles.erase(graph);
  }
  forget(tasks);
  return ok;
}

aclError aclmdlRIDebugPrint(aclmdlRI) { return ok; }

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle) {
  Stream *stream = stream_of(handle);
  Lock lock(machine().mutex);
  auto capture = stream->capture;
  if (!capture) return fail(stream_not_captured, "a task group begins on a stream that is not being captured [R85]");
  if (capture->group) return refuse(lock, capture, group_status, "a task group begins inside another [R85]");
  capture->graph->groups.push_back(std::make_unique<Group>(Group{capture->graph.get(), stream, {}}));
  capture->group = capture->graph->groups.back().get();
  return ok;
}

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp *result) {
  Stream *stream = stream_of(handle);
  Lock lock(machine().mutex);
  auto capture = stream->capture;
  if (!capture) return fail(stream_not_captured, "a task group ends on a stream that is not being captured [R85]");
  if (!capture->group) return refuse(lock, capture, group_status, "a task group ends that was not begun [R85]");
  if (capture->group->stream != stream) return refuse(lock, capture, group_status, "a task group ends on another stream than it began on [R85]");
  size_t count = capture->group->tasks.size();
  if (count != 1) return refuse(lock, capture, group_status, "a task group holds exactly one operator, this one holds " + std::to_string(count) + " [R85]");
  if (capture->graph->tasks[capture->group->tasks[0]].kind != Kind::kernel) return refuse(lock, capture, group_status, "a task group holds something else than an operator [R85]");
  *result = (aclrtTaskGrp)capture->group;
  machine().groups.insert(capture->group);
  capture->group = nullptr;
  return ok;
}

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp group_handle) {
  Stream *stream = stream_of(handle);
  Group *group = (Group *)group_handle;
  Lock lock(machine().mutex);
  if (!machine().groups.count(group)) return fail(group_status, "a task update of an unknown handle [R86]");
  if (stream->capture) return refuse(lock, stream->capture, stream_captured, "a task update on a stream that is being captured [R86]");
  if (stream == group->stream) return fail(group_status, "a task update on the stream that was captured [R86]");
  if (stream->updating) return fail(group_status, "a task update begins inside another [R86]");
  stream->updating = group;
  stream->update_calls.clear();
  return ok;
}

aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle) {
  Stream *stream = stream_of(handle);
  Task task{Kind::update};
  {
    Lock lock(machine().mutex);
    if (!stream->updating) return fail(group_status, "a task update ends that was not begun [R86]");
    task.group = stream->updating, task.graph = handles[stream->updating->graph], task.calls.swap(stream->update_calls);
    stream->updating = nullptr;
    if (task.calls.size() != task.group->tasks.size())
      return fail(cannot_update, "a task update brings " + std::to_string(task.calls.size()) + " operators for a group of " + std::to_string(task.group->tasks.size()) + " [R86]");
  }
  return submit(stream, std::move(task));
}

// For the op kernels: the number of the captured call that an update on this stream replaces next; 0 when there is none.
uint64_t emulator_update_target(aclrtStream handle) {
  Stream *stream = stream_of(handle);
  Lock lock(machine().mutex);
  Group *group = stream->updating;
  if (!group || stream->update_calls.size() >= group->tasks.size()) return 0;
  return group->graph->tasks[group->tasks[stream->update_calls.size()]].call;
}
}
