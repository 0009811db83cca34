// One communicator: a piece of shared memory with a barrier, a slot per rank, and a mailbox per pair of ranks.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>

namespace emulator {

struct Communicator {
  static const size_t slot = 64u << 20;  // untouched pages cost nothing
  static const size_t mail = 4u << 20;
  static const unsigned most_ranks = 16;

  std::string name;
  uint32_t ranks = 0, rank = 0;
  long reserved = 0;                     // bytes of its device

  bool open();                           // attaches and waits for everybody; false: see the recent error
  int barrier();
  int agree(const std::string &call);    // waits for everybody; an error when another rank is in another call
  char *slot_of(uint32_t rank) const;
  int send(const void *data, size_t bytes, uint32_t to);
  int receive(void *data, size_t bytes, uint32_t from);

 private:
  struct Mailbox { std::atomic<uint64_t> filled, emptied; std::atomic<uint64_t> bytes; };
  struct Header {
    std::atomic<uint32_t> count, generation;
    std::atomic<int32_t> processes[most_ranks];
    char calls[most_ranks][96];
    Mailbox mailboxes[most_ranks * most_ranks];
  };
  Header *header = nullptr;
  char *data = nullptr;
  template <class Condition> int wait(Condition condition, const char *what);
  int everybody_alive() const;
};

// Element-wise a = a op b over `count` elements; op: 0 sum, 1 product, 2 maximum, 3 minimum. False: type not emulated.
// Low-precision floats are reduced in float and rounded once per call; HCCL's own order of rounding is not known here.
bool reduce(void *result, const char *const *operands, unsigned how_many, size_t count, int type, int op);
size_t size_of(int type);
}  // namespace emulator
