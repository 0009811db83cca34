// HCCL on one host. A collective is a task of its stream like any other: it queues behind a suspended replay and can be
// captured. All ranks must be processes of this machine. Long operands go through the slots piece by piece.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unistd.h>

#include "acl/acl.h"
#include "hccl/hccl.h"
#include "hccl_shm.h"
#include "machine.h"

using namespace emulator;

namespace {
const size_t piece = Communicator::slot;

// `common`: bytes that all ranks must agree on, or that they may differ, or that ranks act apart (send, receive).
const size_t differs = ~0ul, apart = ~0ul - 1;

int launch(const char *name, Communicator *communicator, size_t bytes, aclrtStream handle, std::function<int()> work, size_t common = differs) {
  Stream *stream = stream_of(handle);
  int id = stream->id;
  bool captured;
  {
    Lock lock(machine().mutex);
    captured = stream->capture != nullptr;
  }
  std::string what = std::string("\"event\": \"collective\", \"name\": \"") + name + "\", \"bytes\": " + std::to_string(bytes) +
                     ", \"ranks\": " + std::to_string(communicator->ranks) + ", \"stream\": " + std::to_string(id);
  if (captured) trace(what + ", \"phase\": \"capture\"");
  std::string line = what + (captured ? ", \"phase\": \"replay\"" : ", \"phase\": \"eager\"");
  std::string call = std::string(name) + (common < apart ? " of " + std::to_string(common) + " bytes" : "");
  return submit_work(stream, [=] {
    int code = common == apart ? 0 : communicator->agree(call);
    if (!code) code = work();
    if (!code) trace(line);
    return code;
  });
}

int bad_type(int type) { return fail(HCCL_E_NOT_SUPPORT, "HCCL data type " + std::to_string(type) + " is not emulated"); }

// What `root` has in its slot after everybody put `bytes` of `source` there, piece by piece.
template <class Use> int exchange(Communicator *c, const char *source, size_t bytes, Use use) {
  for (size_t done = 0; done < bytes; done += piece) {
    size_t part = std::min<size_t>(piece, bytes - done);
    if (source) memcpy(c->slot_of(c->rank), source + done, part);
    if (int code = c->barrier()) return code;
    if (int code = use(done, part)) return code;
    if (int code = c->barrier()) return code;
  }
  return 0;
}

// Reduces the slots into `target`.
int reduce_slots(Communicator *c, char *target, size_t offset, size_t bytes, int type, int op) {
  const char *operands[Communicator::most_ranks];
  for (uint32_t r = 0; r < c->ranks; r++) operands[r] = c->slot_of(r) + offset;
  return reduce(target, operands, c->ranks, bytes / size_of(type), type, op) ? 0 : bad_type(type);
}

int all_to_all(Communicator *c, const char *source, const std::vector<uint64_t> &send, const std::vector<uint64_t> &from, char *target, const std::vector<uint64_t> &receive, const std::vector<uint64_t> &to, size_t width) {
  // The slot holds a table of offsets and sizes, then the data in the order of the receivers.
  size_t table = c->ranks * 2 * sizeof(uint64_t), position = table;
  char *own = c->slot_of(c->rank);
  for (uint32_t r = 0; r < c->ranks; r++) {
    uint64_t bytes = send[r] * width;
    if (position + bytes > piece) return fail(HCCL_E_MEMORY, "an all-to-all of more than " + std::to_string(piece) + " bytes is not emulated");
    ((uint64_t *)own)[2 * r] = position, ((uint64_t *)own)[2 * r + 1] = bytes;
    memcpy(own + position, source + from[r] * width, bytes);
    position += bytes;
  }
  if (int code = c->barrier()) return code;
  std::string wrong;  // told behind the last barrier: the other ranks wait there
  for (uint32_t r = 0; r < c->ranks; r++) {
    const uint64_t *entry = (const uint64_t *)c->slot_of(r) + 2 * c->rank;
    if (entry[1] == receive[r] * width) memcpy(target + to[r] * width, c->slot_of(r) + entry[0], entry[1]);
    else wrong = "all-to-all: rank " + std::to_string(r) + " sends " + std::to_string(entry[1]) + " bytes and rank " + std::to_string(c->rank) + " expects " + std::to_string(receive[r] * width);
  }
  if (int code = c->barrier()) return code;
  return wrong.empty() ? 0 : fail(HCCL_E_PARA, wrong);
}

// Those of this process, for kernels that communicate (ops/moe_distribute.py).
std::mutex names_mutex;
std::map<std::string, Communicator *> names;

Communicator *named(const char *name) {
  std::lock_guard<std::mutex> lock(names_mutex);
  auto found = names.find(name);
  return found == names.end() ? nullptr : found->second;
}

// What a communicator takes of its device: a buffer to send and one to receive, each of the size that it was made with,
// which counts before HCCL_BUFFSIZE (CANN's page on that variable). Here it is counted only: slots are shared memory.
HcclResult make(uint32_t ranks, const HcclRootInfo *info, uint32_t rank, uint32_t megabytes, HcclComm *result) {
  auto communicator = new Communicator;
  communicator->name = info->internal, communicator->ranks = ranks, communicator->rank = rank;
  communicator->reserved = 2l * megabytes << 20;
  if (reserve(communicator->reserved)) return HCCL_E_MEMORY;
  trace("\"event\": \"communicator\", \"ranks\": " + std::to_string(ranks) + ", \"bytes\": " + std::to_string(communicator->reserved));
  if (!communicator->open()) return HCCL_E_SYSCALL;
  std::lock_guard<std::mutex> lock(names_mutex);
  names[communicator->name.substr(1)] = communicator;
  *result = communicator;
  return HCCL_SUCCESS;
}

uint32_t buffer_size() {
  const char *asked = getenv("HCCL_BUFFSIZE");
  return asked && atoi(asked) > 0 ? atoi(asked) : HCCL_COMM_DEFAULT_BUFFSIZE;
}

std::vector<uint64_t> numbers(const void *list, uint32_t count) { return {(const uint64_t *)list, (const uint64_t *)list + count}; }
}  // namespace

extern "C" {
HcclResult HcclGetRootInfo(HcclRootInfo *info) {
  static int count = 0;
  memset(info, 0, sizeof *info);
  snprintf(info->internal, 128, "/ascend_emulator_%d_%d_%llu", getpid(), count++, (unsigned long long)now());
  return HCCL_SUCCESS;
}
HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo *info, uint32_t rank, HcclComm *result) { return make(ranks, info, rank, buffer_size(), result); }
HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo *info, uint32_t rank, const HcclCommConfig *config, HcclComm *result) { return make(ranks, info, rank, config->hcclBufferSize, result); }
uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_RESERVED; }
HcclResult HcclGetCommName(HcclComm comm, char *name) {
  snprintf(name, COMM_NAME_MAX_LENGTH, "%s", ((Communicator *)comm)->name.c_str() + 1);
  return HCCL_SUCCESS;
}
HcclResult HcclGetCommAsyncError(HcclComm, HcclResult *error) { return *error = HCCL_SUCCESS; }
const char *HcclGetErrorString(HcclResult) { return aclGetRecentErrMsg(); }
HcclResult HcclGetRankSize(HcclComm comm, uint32_t *size) { *size = ((Communicator *)comm)->ranks; return HCCL_SUCCESS; }
HcclResult HcclGetRankId(HcclComm comm, uint32_t *rank) { *rank = ((Communicator *)comm)->rank; return HCCL_SUCCESS; }
HcclResult HcclCommDestroy(HcclComm comm) {
  auto communicator = (Communicator *)comm;
  if (current_device() >= 0) reserve(-communicator->reserved);
  communicator->reserved = 0;
  std::lock_guard<std::mutex> lock(names_mutex);
  names.erase(communicator->name.substr(1));
  return HCCL_SUCCESS;
}
HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }

HcclResult HcclAllReduce(void *source, void *target, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm, aclrtStream stream) {
  auto c = (Communicator *)comm;
  size_t bytes = count * size_of(type);
  return (HcclResult)launch("HcclAllReduce", c, bytes, stream, [=] {
    return exchange(c, (char *)source, bytes, [=](size_t done, size_t part) { return reduce_slots(c, (char *)target + done, 0, part, type, op); });
  }, bytes);
}
HcclResult HcclReduce(void *source, void *target, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root, HcclComm comm, aclrtStream stream) {
  auto c = (Communicator *)comm;
  size_t bytes = count * size_of(type);
  return (HcclResult)launch("HcclReduce", c, bytes, stream, [=] {
    return exchange(c, (char *)source, bytes, [=](size_t done, size_t part) { return c->rank == root ? reduce_slots(c, (char *)target + done, 0, part, type, op) : 0; });
  }, bytes);
}
HcclResult HcclAllGather(void *source, void *target, uint64_t count, HcclDataType type, HcclComm comm, aclrtStream stream) {
  auto c = (Communicator *)comm;
  size_t bytes = count * size_of(type);
  return (HcclResult)launch("HcclAllGather", c, bytes, stream, [=] {
    return exchange(c, (char *)source, bytes, [=](size_t done, size_t part) {
      for (uint32_t r = 0; r < c->ranks; r++) memcpy((char *)target + r * bytes + done, c->slot_of(r), part);
      return 0;
    });
  }, bytes);
}
// Their buffers are const in torch-npu 2.7.1's headers and not in 2.10's, so these two are defined by the symbol.
HcclResult all_gather_v(const void *source, uint64_t count, const void *target, const void *counts, const void *displacements, HcclDataType type, HcclComm comm, aclrtStream stream) __asm__("HcclAllGatherV");
HcclResult reduce_scatter_v(const void *source, const void *counts, const void *displacements, const void *target, uint64_t, HcclDataType type, HcclReduceOp op, HcclComm comm, aclrtStream stream) __asm__("HcclReduceScatterV");
HcclResult all_gather_v(const void *source, uint64_t count, const void *target, const void *counts, const void *displacements, HcclDataType type, HcclComm comm, aclrtStream stream) {
  auto c = (Communicator *)comm;
  size_t width = size_of(type);
  auto n = numbers(counts, c->ranks), at = numbers(displacements, c->ranks);
  return (HcclResult)launch("HcclAllGatherV", c, count * width, stream, [=] {
    size_t longest = *std::max_element(n.begin(), n.end()) * width;
    if (longest > piece) return fail(HCCL_E_MEMORY, "an HcclAllGatherV of this size is not emulated");
    memcpy(c->slot_of(c->rank), source, count * width);
    if (int code = c->barrier()) return code;
    for (uint32_t r = 0; r < c->ranks; r++) memcpy((char *)target + at[r] * width, c->slot_of(r), n[r] * width);
    return c->barrier();
  });
}
HcclResult HcclReduceScatter(void *source, void *target, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm, aclrtStream stream) {
  auto c = (Communicator *)comm;
  size_t bytes = count * size_of(type);
  return (HcclResult)launch("HcclReduceScatter", c, bytes * c->ranks, stream, [=] {
    for (uint32_t receiver = 0; receiver < c->ranks; receiver++) {
      int code = exchange(c, (char *)source + receiver * bytes, bytes, [=](size_t done, size_t part) { return c->rank == receiver ? reduce_slots(c, (char *)target + done, 0, part, type, op) : 0; });
      if (code) return code;
    }
    return 0;
  }, bytes);
}
HcclResult reduce_scatter_v(const void *source, const void *counts, const void *displacements, const void *target, uint64_t, HcclDataType type, HcclReduceOp op, HcclComm comm, aclrtStream stream) {
  auto c = (Communicator *)comm;
  size_t width = size_of(type);
  auto n = numbers(counts, c->ranks), at = numbers(displacements, c->ranks);
  return (HcclResult)launch("HcclReduceScatterV", c, n[c->rank] * width * c->ranks, stream, [=] {
    for (uint32_t receiver = 0; receiver < c->ranks; receiver++) {
      int code = exchange(c, (const char *)source + at[receiver] * width, n[receiver] * width, [=](size_t done, size_t part) { return c->rank == receiver ? reduce_slots(c, (char *)target + done, 0, part, type, op) : 0; });
      if (code) return code;
    }
    return 0;
  });
}
HcclResult HcclBroadcast(void *buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm, aclrtStream stream) {
  auto c = (Communicator *)comm;
  size_t bytes = count * size_of(type);
  return (HcclResult)launch("HcclBroadcast", c, bytes, stream, [=] {
    return exchange(c, c->rank == root ? (char *)buffer : nullptr, bytes, [=](size_t done, size_t part) {
      if (c->rank != root) memcpy((char *)buffer + done, c->slot_of(root), part);
      return 0;
    });
  }, bytes);
}
HcclResult HcclScatter(void *source, void *target, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm, aclrtStream stream) {
  auto c = (Communicator *)comm;
  size_t bytes = count * size_of(type);
  return (HcclResult)launch("HcclScatter", c, bytes, stream, [=] {
    for (uint32_t receiver = 0; receiver < c->ranks; receiver++) {
      int code = exchange(c, c->rank == root ? (char *)source + receiver * bytes : nullptr, bytes, [=](size_t done, size_t part) {
        if (c->rank == receiver) memcpy((char *)target + done, c->slot_of(root), part);
        return 0;
      });
      if (code) return code;
    }
    return 0;
  }, bytes);
}
HcclResult HcclAlltoAllV(const void *source, const void *send_counts, const void *send_at, HcclDataType type, const void *target, const void *receive_counts, const void *receive_at, HcclDataType, HcclComm comm, aclrtStream stream) {
  auto c = (Communicator *)comm;
  size_t width = size_of(type), bytes = 0;
  auto send = numbers(send_counts, c->ranks), from = numbers(send_at, c->ranks), receive = numbers(receive_counts, c->ranks), to = numbers(receive_at, c->ranks);
  for (auto n : send) bytes += n * width;
  return (HcclResult)launch("HcclAlltoAllV", c, bytes, stream, [=] { return all_to_all(c, (const char *)source, send, from, (char *)target, receive, to, width); });
}
HcclResult HcclAlltoAll(const void *source, uint64_t count, HcclDataType type, const void *target, uint64_t, HcclDataType, HcclComm comm, aclrtStream stream) {
  auto c = (Communicator *)comm;
  std::vector<uint64_t> counts(c->ranks, count), at(c->ranks);
  for (uint32_t r = 0; r < c->ranks; r++) at[r] = r * count;
  return HcclAlltoAllV(source, counts.data(), at.data(), type, target, counts.data(), at.data(), type, comm, stream);
}
HcclResult HcclSend(void *source, uint64_t count, HcclDataType type, uint32_t to, HcclComm comm, aclrtStream stream) {
  auto c = (Communicator *)comm;
  size_t bytes = count * size_of(type);
  return (HcclResult)launch("HcclSend", c, bytes, stream, [=] { return c->send(source, bytes, to); }, apart);
}
HcclResult HcclRecv(void *target, uint64_t count, HcclDataType type, uint32_t from, HcclComm comm, aclrtStream stream) {
  auto c = (Communicator *)comm;
  size_t bytes = count * size_of(type);
  return (HcclResult)launch("HcclRecv", c, bytes, stream, [=] { return c->receive(target, bytes, from); }, apart);
}
HcclResult HcclBatchSendRecv(HcclSendRecvItemDef *items, uint32_t count, HcclComm comm, aclrtStream stream) {
  auto c = (Communicator *)comm;
  std::vector<HcclSendRecvItemDef> all(items, items + count);
  size_t bytes = 0;
  for (auto &item : all) bytes += item.count * size_of(item.dataType);
  return (HcclResult)launch("HcclBatchSendRecv", c, bytes, stream, [=] {
    // sends first; a mailbox takes one message of Communicator::mail bytes without a receiver
    for (auto &item : all)
      if (item.sendRecvType == HCCL_SEND)
        if (int code = c->send(item.buf, item.count * size_of(item.dataType), item.remoteRank)) return code;
    for (auto &item : all)
      if (item.sendRecvType == HCCL_RECV)
        if (int code = c->receive(item.buf, item.count * size_of(item.dataType), item.remoteRank)) return code;
    return 0;
  }, apart);
}
int emulator_group(const char *name, uint32_t *ranks, uint32_t *rank, uint64_t *window) {
  Communicator *c = named(name);
  if (c) *ranks = c->ranks, *rank = c->rank, *window = c->reserved / 2;
  return c != nullptr;
}
int emulator_gather(const char *name, const char *what, const void *mine, uint64_t bytes, void *all) {
  Communicator *c = named(name);
  if (!c) return fail(HCCL_E_PARA, std::string("no communicator ") + name);
  if (int code = c->agree(std::string(what) + " of " + std::to_string(bytes) + " bytes")) return code;
  return exchange(c, (const char *)mine, bytes, [=](size_t done, size_t part) {
    for (uint32_t r = 0; r < c->ranks; r++) memcpy((char *)all + r * bytes + done, c->slot_of(r), part);
    return 0;
  });
}
HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
  auto c = (Communicator *)comm;
  return (HcclResult)launch("HcclBarrier", c, 0, stream, [=] { return c->barrier(); });
}
}
