/* What a lowered kernel calls: its on-chip buffers, copies between strided pieces of memory, roundings to bfloat16. */
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
