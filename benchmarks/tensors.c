/* Counts the bytes of tensors apart from all others of the heap, and their peaks: preload it.

   PyTorch's allocator on the CPU asks for aligned memory (posix_memalign), and hardly anybody else does. */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

#define PLACES (1 << 20)
#define ALIGN 64 /* of tensors */

static uintptr_t places[PLACES]; /* open addressing: the aligned blocks that are alive */
static size_t sizes[PLACES];
static atomic_flag busy = ATOMIC_FLAG_INIT;
static long tensors, others, most_tensors, most;

static void lock(void) { while (atomic_flag_test_and_set_explicit(&busy, memory_order_acquire)) {} }
static void unlock(void) { atomic_flag_clear_explicit(&busy, memory_order_release); }
static unsigned place_of(uintptr_t p) { return (unsigned)((p * 11400714819323198485ull) >> 44) & (PLACES - 1); }

static void look(void) {
    if (tensors > most_tensors) most_tensors = tensors;
    if (tensors + others > most) most = tensors + others;
}

static void *plain(void *block) {
    if (!block) return block;
    lock();
    others += (long)malloc_usable_size(block);
    look();
    unlock();
    return block;
}

static void drop(unsigned at) { /* later entries of the same run move up */
    tensors -= (long)sizes[at];
    for (unsigned next = (at + 1) & (PLACES - 1); places[next]; next = (next + 1) & (PLACES - 1)) {
        unsigned home = place_of(places[next]);
        if (((next - home) & (PLACES - 1)) < ((next - at) & (PLACES - 1))) continue;
        places[at] = places[next];
        sizes[at] = sizes[next];
        at = next;
    }
    places[at] = 0;
}

static void *aligned(size_t align, size_t size) {
    void *block = __libc_memalign(align, size);
    if (!block || align < ALIGN) return plain(block);
    lock();
    unsigned at = place_of((uintptr_t)block);
    while (places[at]) at = (at + 1) & (PLACES - 1);
    places[at] = (uintptr_t)block;
    sizes[at] = size;
    tensors += (long)size;
    look();
    unlock();
    return block;
}

static void gone(void *block) {
    if (!block) return;
    lock();
    unsigned at = place_of((uintptr_t)block);
    while ((uintptr_t)block % ALIGN == 0 && places[at] && places[at] != (uintptr_t)block) at = (at + 1) & (PLACES - 1);
    if (places[at] == (uintptr_t)block) drop(at);
    else others -= (long)malloc_usable_size(block);
    unlock();
}

void *malloc(size_t size) { return plain(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return plain(__libc_calloc(count, size)); }
void free(void *block) { gone(block); __libc_free(block); }
void *memalign(size_t align, size_t size) { return aligned(align, size); }
void *aligned_alloc(size_t align, size_t size) { return aligned(align, size); }

void *realloc(void *block, size_t size) {
    gone(block);
    return plain(__libc_realloc(block, size));
}

int posix_memalign(void **block, size_t align, size_t size) {
    *block = aligned(align, size);
    return *block ? 0 : ENOMEM;
}

long tensor_bytes(void) { return tensors; }
long heap_bytes(void) { return tensors + others; }
long tensor_peak(void) { return most_tensors; }
long heap_peak(void) { return most; }

void forget_peaks(void) {
    lock();
    most_tensors = tensors;
    most = tensors + others;
    unlock();
}
