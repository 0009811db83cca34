// Device memory, pinned host memory and copies. Everything is host memory; what is handed out or given back is poisoned
// with 0xFF bytes: NaN in every floating-point type. The real device leaves whatever was there.
#include "machine.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

#include "acl/acl.h"
#include "acl/acl_rt.h"

using namespace emulator;

namespace {
const int poison = 0xFF;
const size_t alignment = 512;
const size_t page = 2 << 20;  // of virtual memory on the device
struct Block { size_t bytes; int device; bool captured; };
std::mutex blocks_mutex;
std::map<uintptr_t, Block> blocks;
// Virtual memory, which torch_npu's `expandable_segments` maps piece by piece: addresses that are reserved, physical
// memory (a file in memory), and what is mapped where. Neighbours in one reservation are one block, as tensors lie
// across them.
struct Physical { int file, device; size_t bytes; bool fresh; };
std::map<uintptr_t, size_t> reserved;
std::map<uintptr_t, size_t> mapped;
std::map<uintptr_t, size_t> pinned;
std::map<int, size_t> used;
uint64_t generation = 1;

// torch_npu tells Python of every block that its allocator takes back, and Python forgets then which exception is on its
// way: `bool(x * 2)`, whose tensor dies while its error rises, ended in a SystemError. So the exception waits outside.
void (*deallocate)(void *);
void (*fetch_error)(void **, void **, void **);
void (*restore_error)(void *, void *, void *);
void deallocate_beside_error(void *tensor) {
  void *type, *value, *traceback;
  fetch_error(&type, &value, &traceback);
  deallocate(tensor);
  restore_error(type, value, traceback);
}

size_t total() {
  static const size_t bytes = strtoull(setting("MEMORY", "4294967296"), nullptr, 0);
  return bytes;
}

// Bytes that this machine can still give; a page that is written beyond them ends the process without a word.
size_t available() {
  size_t kilobytes = 0;
  FILE *file = fopen("/proc/meminfo", "r");
  if (!file) return SIZE_MAX;
  char line[128];
  while (fgets(line, sizeof line, file) && sscanf(line, "MemAvailable: %zu", &kilobytes) != 1) {}
  fclose(file);
  return kilobytes ? kilobytes << 10 : SIZE_MAX;
}

int full(size_t bytes, int device) {
  return fail(out_of_memory, "device memory is full: " + std::to_string(bytes) + " bytes asked for, " + std::to_string(total() - used[device]) + " of " + std::to_string(total()) + " free (`--memory` sets the total)");
}

int host_full(size_t bytes) {
  return fail(out_of_memory, "the host's memory is full: " + std::to_string(bytes) + " bytes of the emulated device are asked for, " + std::to_string(available()) + " are free; take less than the card has (`--num-gpu-blocks-override` for a KV cache)");
}

template <class Map, class Size> bool inside(Map &map, const void *pointer, size_t bytes, Size size) {
  uintptr_t address = (uintptr_t)pointer;
  auto next = map.upper_bound(address);
  if (next == map.begin()) return false;
  --next;
  return address + bytes <= next->first + size(next->second);
}

const char *name(aclrtMemcpyKind kind) {
  static const char *names[] = {"h2h", "h2d", "d2h", "d2d"};
  return (unsigned)kind < 4 ? names[kind] : "?";
}

void trace_copy(aclrtMemcpyKind kind, size_t bytes, bool synchronous, bool page_locked, const char *phase, int stream) {
  if (tracing())
    trace(std::string("\"event\": \"copy\", \"kind\": \"") + name(kind) + "\", \"bytes\": " + std::to_string(bytes) +
          ", \"sync\": " + (synchronous ? "true" : "false") + ", \"pinned\": " + (page_locked ? "true" : "false") +
          ", \"phase\": \"" + phase + "\", \"stream\": " + std::to_string(stream));
}

int check_copy(const void *target, size_t room, const void *source, size_t bytes, aclrtMemcpyKind kind) {
  if (bytes > room) return fail(invalid_parameter, "a copy of more bytes than its target has room for");
  bool to_device = kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
  bool from_device = kind == ACL_MEMCPY_DEVICE_TO_HOST || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
  if (bytes && to_device != is_device(target, bytes)) return fail(invalid_parameter, std::string("the target of a copy ") + name(kind) + (to_device ? " is not device memory" : " is device memory"));
  if (bytes && from_device != is_device(source, bytes)) return fail(invalid_parameter, std::string("the source of a copy ") + name(kind) + (from_device ? " is not device memory" : " is device memory"));
  return ok;
}

int forbidden_while_capturing(const char *what) {
  Lock lock(machine().mutex);
  auto capture = forbidding_capture();
  if (!capture) return ok;
  return refuse(lock, capture, not_on_captured_stream, std::string(what) + " is not allowed while a graph is being captured [R82]");
}
}  // namespace

namespace emulator {
bool is_device(const void *pointer, size_t bytes) {
  std::lock_guard<std::mutex> guard(blocks_mutex);
  return inside(blocks, pointer, bytes, [](const Block &block) { return block.bytes; });
}
bool is_pinned(const void *pointer) {
  std::lock_guard<std::mutex> guard(blocks_mutex);
  return inside(pinned, pointer, 1, [](size_t bytes) { return bytes; });
}
int reserve(long bytes) {
  int device = current_device();
  if (device < 0) return fail(no_context, "memory is reserved before a device is set");
  std::lock_guard<std::mutex> guard(blocks_mutex);
  if (bytes > 0 && used[device] + bytes > total()) return full(bytes, device);
  used[device] += bytes;
  return ok;
}
}  // namespace emulator

extern "C" {
aclError aclrtMalloc(void **pointer, size_t bytes, aclrtMemMallocPolicy) {
  int device = current_device();
  if (device < 0) return fail(no_context, "memory is allocated before a device is set");
  if (!bytes) return fail(invalid_parameter, "an allocation of zero bytes");
  bool captured;
  {
    Lock lock(machine().mutex);
    captured = !machine().captures.empty();
  }
  std::lock_guard<std::mutex> guard(blocks_mutex);
  if (used[device] + bytes > total()) return full(bytes, device);
  if (bytes > 256u << 20 && bytes > available()) return host_full(bytes);
  if (posix_memalign(pointer, alignment, (bytes + alignment - 1) / alignment * alignment)) return fail(out_of_memory, "the host's memory is full");
  memset(*pointer, poison, bytes);
  blocks[(uintptr_t)*pointer] = Block{bytes, device, captured};
  used[device] += bytes;
  generation++;
  return ok;
}

aclError aclrtMallocAlign32(void **pointer, size_t bytes, aclrtMemMallocPolicy policy) { return aclrtMalloc(pointer, bytes, policy); }

aclError aclrtFree(void *pointer) {
  std::lock_guard<std::mutex> guard(blocks_mutex);
  auto block = blocks.find((uintptr_t)pointer);
  if (block == blocks.end()) return fail(invalid_parameter, "memory is freed that was not allocated, or twice");
  memset(pointer, poison, block->second.bytes);
  used[block->second.device] -= block->second.bytes;
  blocks.erase(block);
  generation++;
  free(pointer);
  return ok;
}

// torch-npu 2.7.1's headers do not know it
aclError granularity(const void *, int, size_t *bytes) __asm__("aclrtMemGetAllocationGranularity");
aclError granularity(const void *, int, size_t *bytes) { *bytes = page; return ok; }

aclError aclrtReserveMemAddress(void **pointer, size_t bytes, size_t, void *, uint64_t) {
  bytes = (bytes + page - 1) / page * page;  // torch_npu tries 512 bytes first, to see whether there is such a thing
  char *all = (char *)mmap(nullptr, bytes + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) return fail(out_of_memory, "this machine has no addresses left");
  uintptr_t start = ((uintptr_t)all + page - 1) / page * page;
  *pointer = (void *)start;
  std::lock_guard<std::mutex> guard(blocks_mutex);
  reserved[start] = bytes;
  return ok;
}

aclError aclrtReleaseMemAddress(void *pointer) {
  std::lock_guard<std::mutex> guard(blocks_mutex);
  auto range = reserved.find((uintptr_t)pointer);
  if (range == reserved.end()) return fail(invalid_parameter, "addresses are released that were not reserved, or twice");
  auto first = mapped.lower_bound(range->first);
  if (first != mapped.end() && first->first < range->first + range->second) return fail(invalid_parameter, "addresses are released while memory is mapped there");
  munmap(pointer, range->second);
  reserved.erase(range);
  return ok;
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t bytes, const aclrtPhysicalMemProp *wanted, uint64_t) {
  int device = wanted->location.id;
  if (!bytes || bytes % page) return fail(invalid_parameter, "physical memory comes in pages of 2 MiB, got " + std::to_string(bytes) + " bytes");
  std::lock_guard<std::mutex> guard(blocks_mutex);
  if (used[device] + bytes > total()) return full(bytes, device);
  if (bytes > 256u << 20 && bytes > available()) return host_full(bytes);
  int file = memfd_create("ascend-emulator", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, bytes)) return fail(out_of_memory, "the host's memory is full");
  used[device] += bytes;
  *handle = (aclrtDrvMemHandle) new Physical{file, device, bytes, true};
  return ok;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  auto physical = (Physical *)handle;
  std::lock_guard<std::mutex> guard(blocks_mutex);
  used[physical->device] -= physical->bytes;
  close(physical->file);
  delete physical;
  return ok;
}

aclError aclrtMapMem(void *pointer, size_t bytes, size_t offset, aclrtDrvMemHandle handle, uint64_t) {
  auto physical = (Physical *)handle;
  bool captured;
  {
    Lock lock(machine().mutex);
    captured = !machine().captures.empty();
  }
  uintptr_t start = (uintptr_t)pointer;
  std::lock_guard<std::mutex> guard(blocks_mutex);
  if (!inside(reserved, pointer, bytes, [](size_t size) { return size; })) return fail(invalid_parameter, "memory is mapped at addresses that are not reserved");
  if (offset || bytes != physical->bytes) return fail(invalid_parameter, "physical memory is mapped as a whole");
  if (mmap(pointer, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, physical->file, 0) == MAP_FAILED) return fail(out_of_memory, "the host's memory is full");
  if (physical->fresh) memset(pointer, poison, bytes);
  physical->fresh = false;
  mapped[start] = bytes;
  Block block{bytes, physical->device, captured};
  auto next = blocks.lower_bound(start);
  bool first = reserved.count(start), last = reserved.count(start + bytes);
  if (!last && next != blocks.end() && next->first == start + bytes) {
    block.bytes += next->second.bytes, block.captured |= next->second.captured;
    next = blocks.erase(next);
  }
  if (!first && next != blocks.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second.bytes == start) {
      start = before->first, block.bytes += before->second.bytes, block.captured |= before->second.captured;
      blocks.erase(before);
    }
  }
  blocks[start] = block;
  generation++;
  return ok;
}

aclError aclrtUnmapMem(void *pointer) {
  uintptr_t start = (uintptr_t)pointer;
  std::lock_guard<std::mutex> guard(blocks_mutex);
  auto piece = mapped.find(start);
  if (piece == mapped.end()) return fail(invalid_parameter, "memory is unmapped that is not mapped");
  size_t bytes = piece->second;
  mmap(pointer, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  auto block = std::prev(blocks.upper_bound(start));
  Block whole = block->second;
  uintptr_t from = block->first, end = from + whole.bytes;
  blocks.erase(block);
  if (from < start) blocks[from] = Block{start - from, whole.device, whole.captured};
  if (start + bytes < end) blocks[start + bytes] = Block{end - start - bytes, whole.device, whole.captured};
  mapped.erase(piece);
  generation++;
  return ok;
}

aclError aclrtMallocHost(void **pointer, size_t bytes) {
  if (posix_memalign(pointer, alignment, bytes ? bytes : 1)) return fail(out_of_memory, "the host's memory is full");
  memset(*pointer, poison, bytes);
  std::lock_guard<std::mutex> guard(blocks_mutex);
  pinned[(uintptr_t)*pointer] = bytes ? bytes : 1;
  return ok;
}

aclError aclrtFreeHost(void *pointer) {
  std::lock_guard<std::mutex> guard(blocks_mutex);
  if (!pinned.erase((uintptr_t)pointer)) return fail(invalid_parameter, "host memory is freed that was not allocated, or twice");
  free(pointer);
  return ok;
}

aclError aclrtHostRegister(void *pointer, uint64_t bytes, aclrtHostRegisterType, void **device) {
  std::lock_guard<std::mutex> guard(blocks_mutex);
  pinned[(uintptr_t)pointer] = bytes;
  *device = pointer;
  return ok;
}

aclError aclrtHostUnregister(void *pointer) {
  std::lock_guard<std::mutex> guard(blocks_mutex);
  return pinned.erase((uintptr_t)pointer) ? ok : fail(invalid_parameter, "host memory is unregistered that was not registered");
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t *free, size_t *all) {
  int device = current_device();
  if (device < 0) return fail(no_context, "memory is asked for before a device is set");
  std::lock_guard<std::mutex> guard(blocks_mutex);
  *all = total();
  *free = total() - used[device];
  return ok;
}

aclError aclrtMemcpy(void *target, size_t room, const void *source, size_t bytes, aclrtMemcpyKind kind) {
  int code = forbidden_while_capturing("a synchronous copy");
  if (!code) code = check_copy(target, room, source, bytes, kind);
  if (code) return code;
  memmove(target, source, bytes);
  trace_copy(kind, bytes, true, false, "eager", -1);
  return ok;
}

aclError aclrtMemcpyAsync(void *target, size_t room, const void *source, size_t bytes, aclrtMemcpyKind kind, aclrtStream handle) {
  int code = check_copy(target, room, source, bytes, kind);
  if (code) return code;
  Stream *stream = stream_of(handle);
  if (!stream) return fail(no_context, "a copy without a device");
  const void *host = kind == ACL_MEMCPY_HOST_TO_DEVICE ? source : kind == ACL_MEMCPY_DEVICE_TO_HOST ? target : nullptr;
  bool page_locked = !host || is_pinned(host);
  bool capturing;
  {
    Lock lock(machine().mutex);
    capturing = stream->capture != nullptr;
    if (capturing && host && (!page_locked || (strict() && kind == ACL_MEMCPY_DEVICE_TO_HOST)))
      return refuse(lock, stream->capture, not_on_captured_stream,
                    std::string(kind == ACL_MEMCPY_DEVICE_TO_HOST ? "a copy from the device to the host" : "a copy from pageable host memory") + " cannot be captured [R82]");
  }
  int id = stream->id;
  if (capturing) trace_copy(kind, bytes, false, page_locked, "capture", id);
  const char *phase = capturing ? "replay" : "eager";
  if (page_locked)
    return submit_work(stream, [=] { memmove(target, source, bytes), trace_copy(kind, bytes, false, true, phase, id); return 0; });
  if (kind == ACL_MEMCPY_HOST_TO_DEVICE) {  // the driver stages pageable memory before it returns
    auto staged = std::make_shared<std::string>((const char *)source, bytes);
    return submit_work(stream, [=] { memcpy(target, staged->data(), bytes), trace_copy(kind, bytes, true, false, phase, id); return 0; });
  }
  code = submit_work(stream, [=] { memmove(target, source, bytes), trace_copy(kind, bytes, true, false, phase, id); return 0; });
  if (code) return code;
  Lock lock(machine().mutex);
  return drain(lock, stream);
}

aclError aclrtMemset(void *target, size_t room, int32_t value, size_t bytes) {
  int code = forbidden_while_capturing("a synchronous memset");
  if (code) return code;
  if (bytes > room) return fail(invalid_parameter, "a memset of more bytes than its target has");
  memset(target, value, bytes);
  return ok;
}

aclError aclrtMemsetAsync(void *target, size_t room, int32_t value, size_t bytes, aclrtStream handle) {
  if (bytes > room) return fail(invalid_parameter, "a memset of more bytes than its target has");
  return submit_work(stream_of(handle), [=] { memset(target, value, bytes); return 0; });
}

// For the op kernels: the allocation that holds an address, and a number that changes with every allocation.
int emulator_block(const void *pointer, uint64_t *base, uint64_t *bytes, int *captured) {
  std::lock_guard<std::mutex> guard(blocks_mutex);
  auto next = blocks.upper_bound((uintptr_t)pointer);
  if (next == blocks.begin()) return 0;
  --next;
  if ((uintptr_t)pointer >= next->first + next->second.bytes) return 0;
  *base = next->first, *bytes = next->second.bytes, *captured = next->second.captured;
  return 1;
}
// Overwrites memory that was just handed out, behind what the stream still has to do. While capturing it is overwritten
// now and at every replay: a graph that reads what it did not write reads poison each time.
int emulator_poison(aclrtStream handle, void *target, size_t bytes, int value) {
  Stream *stream = stream_of(handle);
  {
    Lock lock(machine().mutex);
    if (stream->capture || (stream->queue.empty() && !stream->running)) memset(target, value, bytes);
    if (!stream->capture && stream->queue.empty() && !stream->running) return ok;
    if (stream->updating || (stream->capture && stream->capture->group)) return ok;
  }
  return submit_work(stream, [=] { memset(target, value, bytes); return 0; });
}
// Overwrites memory that a caching allocator took back, if nothing can still be on its way to it: no stream has work
// left, and the memory is not of a graph's pool, where replays meet again what Python has let go.
void emulator_poison_freed(void *target, size_t bytes, int value) {
  {
    Lock lock(machine().mutex);
    if (!machine().captures.empty() || !machine().pending.empty()) return;
    for (Stream *stream : machine().streams)
      if (stream->running || !stream->queue.empty()) return;
  }
  std::lock_guard<std::mutex> guard(blocks_mutex);
  auto next = blocks.upper_bound((uintptr_t)target);
  if (next == blocks.begin()) return;
  --next;
  if ((uintptr_t)target + bytes <= next->first + next->second.bytes && !next->second.captured) memset(target, value, bytes);
}
uint64_t emulator_generation() { return generation; }
// `type`: torch.Tensor or a class of it; the functions are PyErr_Fetch and PyErr_Restore.
void emulator_keep_errors(void *type, void *fetch, void *restore) {
  void *&slot = static_cast<void **>(type)[6];  // tp_dealloc, in every CPython of 64 bits
  if (slot == (void *)deallocate_beside_error) return;
  deallocate = (decltype(deallocate))slot;
  fetch_error = (decltype(fetch_error))fetch;
  restore_error = (decltype(restore_error))restore;
  slot = (void *)deallocate_beside_error;
}
}
