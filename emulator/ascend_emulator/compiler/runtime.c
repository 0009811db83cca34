/* What a lowered kernel calls: its on-chip buffers, copies between strided pieces of memory, roundings to bfloat16, and
   in a trace what it reads and writes of its tensors. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct block { struct block *next; } block;
static block *blocks;

/* A buffer of the kernel, full of what nothing of it wrote. */
void *kernel_malloc(uint64_t bytes) {
  block *one = aligned_alloc(64, (bytes + 64 + 63) & ~63ull);
  one->next = blocks;
  blocks = one;
  return memset((char *)one + 64, 0xA5, bytes);
}

/* Behind each program: a lowered kernel frees nothing. */
void kernel_release(void) {
  while (blocks) {
    block *next = blocks->next;
    free(blocks);
    blocks = next;
  }
}

/* To the nearest, of two to the even one; libgcc has it from 13 on. A bfloat16 comes back in the low half of xmm0. */
float kernel_bfloat16(float value) __asm__("__truncsfbf2");
float kernel_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  bits = value == value ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : bits >> 16 | 0x40;
  memcpy(&value, &bits, 4);
  return value;
}

/* MLIR's unranked memref: a rank and a pointer to {allocated, aligned, offset, sizes[rank], strides[rank]}. */
typedef struct { int64_t rank; int64_t *descriptor; } memref;

void memrefCopy(int64_t size, memref *from, memref *to) {
  int64_t rank = from->rank, at[16] = {0};
  int64_t *sizes = from->descriptor + 3, *out = sizes + rank, *in = to->descriptor + 3 + rank;
  char *source = (char *)from->descriptor[1] + from->descriptor[2] * size;
  char *target = (char *)to->descriptor[1] + to->descriptor[2] * size;
  for (int64_t axis = 0; axis < rank; axis++)
    if (sizes[axis] == 0) return;
  for (;;) {
    int64_t read = 0, write = 0, axis = rank - 1;
    for (int64_t i = 0; i < rank; i++) { read += at[i] * out[i]; write += at[i] * in[i]; }
    memcpy(target + write * size, source + read * size, size);
    while (axis >= 0 && ++at[axis] == sizes[axis]) at[axis--] = 0;
    if (axis < 0) return;
  }
}

/* Bytes [begin, end) that were touched: neighbours in the order of their touch are one piece. */
typedef struct { int64_t begin, end; } piece;
typedef struct { piece *items; int64_t count, room; } pieces;
static pieces told[2];

static void tell(pieces *kept, int64_t begin, int64_t end) {
  if (kept->count && kept->items[kept->count - 1].end == begin) {
    kept->items[kept->count - 1].end = end;
    return;
  }
  if (kept->count == kept->room) {
    kept->room = kept->room ? 2 * kept->room : 1024;
    kept->items = realloc(kept->items, kept->room * sizeof(piece));
  }
  kept->items[kept->count++] = (piece){begin, end};
}

static void touched(pieces *kept, int64_t rank, int64_t *descriptor, int64_t size) {
  int64_t at[16] = {0}, *sizes = descriptor + 3, *strides = sizes + rank;
  int64_t row = rank && strides[rank - 1] == 1 ? sizes[rank - 1] : 1, outer = rank - (row > 1);
  for (int64_t axis = 0; axis < rank; axis++)
    if (sizes[axis] == 0) return;
  for (;;) {
    int64_t offset = descriptor[2], axis = outer - 1;
    for (int64_t i = 0; i < outer; i++) offset += at[i] * strides[i];
    tell(kept, descriptor[1] + offset * size, descriptor[1] + (offset + row) * size);
    while (axis >= 0 && ++at[axis] == sizes[axis]) at[axis--] = 0;
    if (axis < 0) return;
  }
}

#define ELEMENT(name, size) \
  void kernel_read_##name(int64_t rank, int64_t *tensor) { touched(&told[0], rank, tensor, size); } \
  void kernel_written_##name(int64_t rank, int64_t *tensor) { touched(&told[1], rank, tensor, size); }
ELEMENT(i1, 1)
ELEMENT(i8, 1)
ELEMENT(i16, 2)
ELEMENT(i32, 4)
ELEMENT(i64, 8)
ELEMENT(f16, 2)
ELEMENT(bf16, 2)
ELEMENT(f32, 4)
ELEMENT(f64, 8)

static int by_begin(const void *a, const void *b) {
  int64_t one = ((const piece *)a)->begin, other = ((const piece *)b)->begin;
  return (one > other) - (one < other);
}

/* Bytes that were read (0) or written (1) since the last question, each once. */
int64_t kernel_told(int which) {
  pieces *kept = &told[which];
  int64_t bytes = 0, end = INT64_MIN;
  qsort(kept->items, kept->count, sizeof(piece), by_begin);
  for (piece *one = kept->items; one < kept->items + kept->count; one++) {
    if (one->end > end) {
      bytes += one->end - (one->begin > end ? one->begin : end);
      end = one->end;
    }
  }
  kept->count = 0;
  return bytes;
}

/* The address of a touched byte outside `count` ranges [begin, end), of which none touch each other, or 0. */
int64_t kernel_strayed(const int64_t *ranges, int64_t count) {
  for (int which = 0; which < 2; which++)
    for (piece *one = told[which].items; one < told[which].items + told[which].count; one++) {
      int64_t at = one->begin;
      for (int64_t i = 0; i < 2 * count; i += 2)
        if (ranges[i] <= at && at < ranges[i + 1]) at = ranges[i + 1];
      if (at < one->end) return at;
    }
  return 0;
}
