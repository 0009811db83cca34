// aclrt streams and events. An event counts its recordings; a wait is for the recording that was issued last. An
// external event (torch.npu.ExternalEvent) is a flag instead: it can be awaited before it is recorded.
#include "machine.h"

#include <cstdlib>
#include <cstring>

#include "acl/acl.h"
#include "acl/acl_rt.h"

using namespace emulator;

namespace {
const int cache_op_info = 4;  // ACL_STREAM_ATTR_CACHE_OP_INFO
// Streams of one A2 or A3 device with CANN 8.3; graphs hold theirs as long as they live. Since 8.5 a graph takes few
// (CANN 8.5.0's notes of release; vllm-ascend's PR 9962), and no public text says how many: none is counted there.
const size_t budget = 1984;
bool counted() {
  static const bool value = !strncmp(setting("CANN", "8.3"), "8.3", 3);
  return value;
}
std::map<int, Stream *> default_streams;
std::set<Event *> events;
std::map<void *, Event *> values;  // by their address

size_t streams_in_use(int device) {
  size_t count = 0;
  for (Stream *stream : machine().streams) count += stream->device == device;
  for (Graph *graph : machine().graphs) count += graph->device == device ? graph->streams.size() : 0;
  return count;
}

Stream *create(int device) {  // needs the mutex
  static int ids = 0;
  Stream *stream = new Stream;
  stream->id = ids++, stream->device = device;
  machine().streams.insert(stream);
  return stream;
}

aclError new_stream(aclrtStream *handle) {
  int device = current_device();
  if (device < 0) return fail(no_context, "a stream is created before a device is set");
  Lock lock(machine().mutex);
  int code = emulator_take_stream(device);
  if (code) return code;
  *handle = create(device);
  return ok;
}

aclError synchronize(Stream *stream, const char *what) {
  Lock lock(machine().mutex);
  if (stream->capture) return refuse(lock, stream->capture, stream_captured, std::string(what) + " while the stream is being captured [R82]");
  if (tracing()) {
    lock.unlock();
    trace(std::string("\"event\": \"sync\", \"what\": \"") + what + "\", \"stream\": " + std::to_string(stream->id));
    lock.lock();
  }
  return drain(lock, stream);
}
}  // namespace

int emulator_take_stream(int device) {
  if (!counted() || streams_in_use(device) < budget) return ok;
  return fail(no_stream, "device " + std::to_string(device) + " has no stream left: all " + std::to_string(budget) + " are held by streams and captured graphs [R88]");
}

namespace emulator {
Stream *stream_of(void *handle) {
  if (handle) return (Stream *)handle;
  int device = current_device();
  if (device < 0) return nullptr;
  Lock lock(machine().mutex);
  Stream *&stream = default_streams[device];
  if (!stream) stream = create(device);
  return stream;
}
}  // namespace emulator

extern "C" {
aclError aclrtCreateStream(aclrtStream *stream) { return new_stream(stream); }
aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t, uint32_t) { return new_stream(stream); }
aclError aclrtDestroyStreamForce(aclrtStream handle) {
  Stream *stream = (Stream *)handle;
  Lock lock(machine().mutex);
  if (!machine().streams.count(stream)) return fail(invalid_parameter, "a stream is destroyed that does not exist");
  machine().streams.erase(stream);
  machine().pending.erase(stream);
  delete stream;
  return ok;
}
aclError aclrtDestroyStream(aclrtStream handle) {
  int code = synchronize((Stream *)handle, "stream");
  return code ? code : aclrtDestroyStreamForce(handle);
}
aclError aclrtSynchronizeStream(aclrtStream handle) { return synchronize(stream_of(handle), "stream"); }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t) { return synchronize(stream_of(handle), "stream"); }
aclError aclrtSynchronizeDevice() {
  int device = current_device();
  if (device < 0) return fail(no_context, "a synchronisation before a device is set");
  std::vector<Stream *> all;
  {
    Lock lock(machine().mutex);
    for (auto &capture : machine().captures)
      if (capture->graph->device == device) return refuse(lock, capture, stream_captured, "device synchronisation while a stream is being captured [R82]");
    for (Stream *stream : machine().streams)
      if (stream->device == device) all.push_back(stream);
  }
  trace("\"event\": \"sync\", \"what\": \"device\", \"stream\": -1");
  int result = 0;
  for (Stream *stream : all) {
    Lock lock(machine().mutex);
    int code = machine().streams.count(stream) ? drain(lock, stream) : 0;
    if (code && !result) result = code;
  }
  return result;
}
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }
aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus *status) {
  Stream *stream = stream_of(handle);
  Lock lock(machine().mutex);
  if (stream->capture) return refuse(lock, stream->capture, stream_captured, "a stream query while the stream is being captured [R82]");
  pump(lock, stream);
  *status = stream->running || !stream->queue.empty() ? ACL_STREAM_STATUS_NOT_READY : ACL_STREAM_STATUS_COMPLETE;
  return ok;
}
aclError aclrtStreamGetId(aclrtStream handle, int32_t *id) { *id = stream_of(handle)->id; return ok; }
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ok; }
aclError aclrtSetStreamOverflowSwitch(aclrtStream handle, uint32_t flag) { stream_of(handle)->overflow = flag; return ok; }
aclError aclrtGetStreamOverflowSwitch(aclrtStream handle, uint32_t *flag) { *flag = stream_of(handle)->overflow; return ok; }
// torch_npu 2.10 has a capture keep its operators' shapes for a profiler; 2.7.1's headers do not know it
aclError set_attribute(aclrtStream, int, const void *) __asm__("aclrtSetStreamAttribute");
aclError set_attribute(aclrtStream, int attribute, const void *) { return attribute == cache_op_info ? ok : fail(invalid_parameter, "stream attribute " + std::to_string(attribute) + " is not emulated"); }

aclError aclrtCreateEventWithFlag(aclrtEvent *handle, uint32_t flag) {
  static int ids = 1;
  Lock lock(machine().mutex);
  Event *event = new Event;
  event->id = ids++, event->external = flag & ACL_EVENT_EXTERNAL;
  events.insert(event);
  *handle = event;
  return ok;
}
aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag) { return aclrtCreateEventWithFlag(event, flag); }
aclError aclrtCreateEvent(aclrtEvent *event) { return aclrtCreateEventWithFlag(event, 0); }
aclError aclrtDestroyEvent(aclrtEvent handle) {
  Lock lock(machine().mutex);
  if (!events.erase((Event *)handle)) return fail(invalid_parameter, "an event is destroyed that does not exist");
  return ok;  // the object stays: queues and graphs may name it
}
aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
  Event *event = (Event *)handle;
  Stream *stream = stream_of(stream_handle);
  Task task{Kind::record};
  task.event = event;
  {
    Lock lock(machine().mutex);
    event->capture = event->external ? nullptr : stream->capture;
    if (event->capture) {  // a mark in the order of the capture, no task
      event->clock = stream->capture->clocks[stream];
      return ok;
    }
    if (!stream->capture) task.ticket = ++event->issued;
  }
  return submit(stream, std::move(task));
}
aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
  Event *event = (Event *)handle;
  Stream *stream = stream_of(stream_handle);
  Task task{Kind::wait};
  task.event = event;
  {
    Lock lock(machine().mutex);
    if (!event->external) {
      std::shared_ptr<Capture> from = event->capture && event->capture->active ? event->capture : nullptr;
      if (from) {
        if (stream->capture && stream->capture != from) return refuse(lock, stream->capture, capture_interdependent, "a wait for an event of another capture [R84]");
        stream->capture = from;  // the stream joins the capture
        from->graph->streams.insert(stream);
        auto &clock = from->clocks[stream];
        for (auto &mark : event->clock) clock[mark.first] = std::max(clock[mark.first], mark.second);
        return ok;
      }
      if (stream->capture) return refuse(lock, stream->capture, capture_dependency, "a captured stream waits for an event that was not recorded in the capture [R84]");
      task.ticket = event->issued;
    }
  }
  return submit(stream, std::move(task));
}
aclError aclrtResetEvent(aclrtEvent handle, aclrtStream stream) {
  Task task{Kind::reset};
  task.event = (Event *)handle;
  return submit(stream_of(stream), std::move(task));
}

// torch_npu 2.10 makes an external event of 32 bytes of device memory where CANN has these two: recording it writes 1,
// waiting for it waits for 1 and writes 0. (Where CANN lacks them it makes the event at its first recording, and drops
// what was to wait for it before.)
static aclError value(void *address, uint64_t number, bool waits, aclrtStream handle) {
  if (number > 1 || (waits && number != 1)) return fail(invalid_parameter, "a value of " + std::to_string(number) + " in device memory is not emulated");
  if (!is_device(address, 8)) return fail(invalid_parameter, "a value is written or awaited outside of device memory");
  Task task{waits ? Kind::wait : number ? Kind::record : Kind::reset};
  {
    Lock lock(machine().mutex);
    Event *&event = values[address];
    if (!event) event = new Event, event->external = true;
    task.event = event;
  }
  return submit(stream_of(handle), std::move(task));
}
aclError write_value(void *address, uint64_t number, uint32_t, aclrtStream stream) __asm__("aclrtValueWrite");
aclError write_value(void *address, uint64_t number, uint32_t, aclrtStream stream) { return value(address, number, false, stream); }
aclError wait_value(void *address, uint64_t number, uint32_t, aclrtStream stream) __asm__("aclrtValueWait");
aclError wait_value(void *address, uint64_t number, uint32_t, aclrtStream stream) { return value(address, number, true, stream); }

static int refuse_captured(Lock &lock, Event *event, const char *what) {
  if (event->capture && event->capture->active) return refuse(lock, event->capture, event_captured, std::string(what) + " of an event that was recorded in a running capture [R82]");
  return ok;
}
aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  Event *event = (Event *)handle;
  trace("\"event\": \"sync\", \"what\": \"event\", \"stream\": -1");
  Lock lock(machine().mutex);
  int code = refuse_captured(lock, event, "a synchronisation");
  if (code) return code;
  if (auto capture = forbidding_capture()) return refuse(lock, capture, not_on_captured_stream, "an event synchronisation while a graph is being captured [R82]");
  Stream waiting;  // a queue of its own that holds nothing but the wait
  if (event->completed >= event->issued) return tell(event->failure);
  Task task{Kind::wait};
  task.event = event, task.ticket = event->issued;
  waiting.queue.push_back(task);
  machine().pending.insert(&waiting);
  code = drain(lock, &waiting);
  machine().pending.erase(&waiting);
  return code;
}
aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus *status) {
  Event *event = (Event *)handle;
  Lock lock(machine().mutex);
  int code = refuse_captured(lock, event, "a query");
  if (code) return code;
  pump(lock, nullptr);
  *status = event->completed >= event->issued ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return ok;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus *status) {
  aclrtEventRecordedStatus recorded;
  int code = aclrtQueryEventStatus(handle, &recorded);
  *status = recorded == ACL_EVENT_RECORDED_STATUS_COMPLETE ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return code;
}
aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end) {
  Event *from = (Event *)start, *to = (Event *)end;
  if (!from->nanoseconds || !to->nanoseconds) return fail(107006, "the time of an event that was not recorded");
  *milliseconds = (to->nanoseconds - from->nanoseconds) / 1e6f;
  return ok;
}
aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *microseconds) { *microseconds = ((Event *)event)->nanoseconds / 1000; return ok; }
aclError aclrtLaunchCallback(aclrtCallback function, void *data, aclrtCallbackBlockType, aclrtStream stream) {
  return submit_work(stream_of(stream), [=] { function(data); return 0; });
}
aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return ok; }
aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return ok; }
aclError aclrtProcessReport(int32_t) { return ok; }
aclError aclrtCmoAsync(void *, size_t, aclrtCmoType, aclrtStream) { return ok; }  // a cache hint

// For the op kernels. 0: the stream is idle and now held by the caller, who runs the op and calls emulator_release.
// 1: it is held up, the op must be queued. 2: it is being captured. 3: a task update is open on it.
int emulator_acquire(aclrtStream handle) {
  Stream *stream = stream_of(handle);
  Lock lock(machine().mutex);
  if (stream->capture) return 2;
  if (stream->updating) return 3;
  while (stream->running && stream->queue.empty()) machine().changed.wait(lock);  // another thread's op
  if (stream->running || !stream->queue.empty()) {
    pump(lock, stream);
    if (stream->running || !stream->queue.empty()) return 1;
  }
  stream->running = true;
  stream->launching = std::this_thread::get_id();
  return 0;
}
void emulator_release(aclrtStream handle) {
  Stream *stream = stream_of(handle);
  Lock lock(machine().mutex);
  stream->running = false;
  stream->launching = {};
  if (machine().pending.empty()) machine().changed.notify_all();
  else pump(lock, stream);
}
int emulator_submit(aclrtStream handle, uint64_t call) {
  Task task{Kind::kernel};
  task.call = call;
  return submit(stream_of(handle), std::move(task));
}
int emulator_stream_id(aclrtStream handle) { return stream_of(handle)->id; }
int emulator_capturing(aclrtStream handle) {
  Stream *stream = stream_of(handle);
  Lock lock(machine().mutex);
  return stream->capture != nullptr;
}
// Something that cannot be captured was asked for on a capturing stream.
int emulator_refuse(aclrtStream handle, int code, const char *text) {
  Stream *stream = stream_of(handle);
  Lock lock(machine().mutex);
  return refuse(lock, stream->capture, code, text);
}
}
