#include "hccl_shm.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include "machine.h"

namespace emulator {
namespace {
float to_float(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}
uint16_t to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (value != value) return 0x7FC0;
  return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}
template <class T> T combine(T a, T b, int op) {
  return op == 0 ? T(a + b) : op == 1 ? T(a * b) : op == 2 ? (a != a || a > b ? a : b) : (a != a || a < b ? a : b);
}
template <class T> void typed(void *result, const char *const *operands, unsigned many, size_t count, int op) {
  T *out = (T *)result;
  for (size_t i = 0; i < count; i++) {
    T value = ((const T *)operands[0])[i];
    for (unsigned k = 1; k < many; k++) value = combine(value, ((const T *)operands[k])[i], op);
    out[i] = value;
  }
}
}  // namespace

size_t size_of(int type) {
  static const size_t sizes[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2};
  return type >= 0 && type < 12 ? sizes[type] : 0;
}

bool reduce(void *result, const char *const *operands, unsigned many, size_t count, int type, int op) {
  switch (type) {
    case 0: typed<int8_t>(result, operands, many, count, op); return true;
    case 1: typed<int16_t>(result, operands, many, count, op); return true;
    case 2: typed<int32_t>(result, operands, many, count, op); return true;
    case 4: typed<float>(result, operands, many, count, op); return true;
    case 5: typed<int64_t>(result, operands, many, count, op); return true;
    case 7: typed<uint8_t>(result, operands, many, count, op); return true;
    case 10: typed<double>(result, operands, many, count, op); return true;
    case 3:
    case 11:
      for (size_t i = 0; i < count; i++) {
        float value = 0;
        for (unsigned k = 0; k < many; k++) {
          float next = type == 11 ? to_float(((const uint16_t *)operands[k])[i]) : (float)((const _Float16 *)operands[k])[i];
          value = k ? combine(value, next, op) : next;
        }
        if (type == 11) ((uint16_t *)result)[i] = to_bfloat16(value);
        else ((_Float16 *)result)[i] = (_Float16)value;
      }
      return true;
  }
  return false;
}

template <class Condition> int Communicator::wait(Condition condition, const char *what) {
  static const double patience = atof(setting("COLLECTIVE_SECONDS", "600"));
  auto start = std::chrono::steady_clock::now();
  for (unsigned turn = 0; !condition(); turn++) {
    if (turn < 100) {
      sched_yield();
      continue;
    }
    usleep(turn < 2000 ? 50 : 500);
    if (turn % 2000 == 0) {
      if (int dead = everybody_alive()) return fail(21, "rank " + std::to_string(dead - 1) + " of communicator " + name + " is gone while rank " + std::to_string(rank) + " waits for " + what);
      if (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > patience)
        return fail(9, "rank " + std::to_string(rank) + " of communicator " + name + " waited too long for " + what);
    }
  }
  return 0;
}

int Communicator::everybody_alive() const {
  for (uint32_t other = 0; other < ranks; other++) {
    int process = header->processes[other].load();
    if (process && kill(process, 0) != 0 && errno == ESRCH) return other + 1;
  }
  return 0;
}

bool Communicator::open() {
  if (ranks > most_ranks) return fail(5, "a communicator of " + std::to_string(ranks) + " ranks; the emulator has up to " + std::to_string(most_ranks)), false;
  size_t bytes = ((sizeof(Header) + 4095) & ~4095ul) + ranks * slot + (size_t)ranks * ranks * mail;
  int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, bytes)) return fail(8, "shared memory " + name + ": " + strerror(errno)), false;
  char *start = (char *)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (start == MAP_FAILED) return fail(8, "shared memory " + name + ": " + strerror(errno)), false;
  header = (Header *)start, data = start + ((sizeof(Header) + 4095) & ~4095ul);
  header->processes[rank] = getpid();
  bool met = barrier() == 0;
  if (rank == 0) shm_unlink(name.c_str());
  return met;
}

int Communicator::barrier() {
  uint32_t generation = header->generation.load();
  if (header->count.fetch_add(1) + 1 == ranks) {
    header->count = 0;
    header->generation++;
    return 0;
  }
  return wait([&] { return header->generation.load() != generation; }, "the others");
}

// The announcements are written again in the next collective at the earliest, and each ends with a barrier.
int Communicator::agree(const std::string &call) {
  snprintf(header->calls[rank], sizeof header->calls[rank], "%s", call.c_str());
  if (int code = barrier()) return code;
  for (uint32_t other = 0; other < ranks; other++)
    if (strcmp(header->calls[other], header->calls[rank]))
      return fail(5, "rank " + std::to_string(rank) + " of communicator " + name + " is in " + header->calls[rank] + " and rank " + std::to_string(other) + " in " + header->calls[other] + ": collectives that do not meet hang on the device");
  return 0;
}

char *Communicator::slot_of(uint32_t other) const { return data + other * slot; }

int Communicator::send(const void *source, size_t bytes, uint32_t to) {
  Mailbox &box = header->mailboxes[rank * most_ranks + to];
  char *room = data + ranks * slot + ((size_t)rank * ranks + to) * mail;
  for (size_t done = 0; done < bytes || !bytes; done += mail) {
    if (int code = wait([&] { return box.filled.load() == box.emptied.load(); }, "a receiver")) return code;
    size_t part = std::min<size_t>(mail, bytes - done);
    memcpy(room, (const char *)source + done, part);
    box.bytes = part;
    box.filled++;
    if (!bytes) break;
  }
  return 0;
}

int Communicator::receive(void *target, size_t bytes, uint32_t from) {
  Mailbox &box = header->mailboxes[from * most_ranks + rank];
  char *room = data + ranks * slot + ((size_t)from * ranks + rank) * mail;
  for (size_t done = 0; done < bytes || !bytes; done += mail) {
    if (int code = wait([&] { return box.filled.load() != box.emptied.load(); }, "a sender")) return code;
    size_t part = std::min<size_t>(mail, bytes - done);
    if (box.bytes != part) return fail(1, "rank " + std::to_string(from) + " sent " + std::to_string(box.bytes.load()) + " bytes and rank " + std::to_string(rank) + " expects " + std::to_string(part));
    memcpy((char *)target + done, room, part);
    box.emptied++;
    if (!bytes) break;
  }
  return 0;
}
}  // namespace emulator
