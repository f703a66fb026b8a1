/* The heap of an arena, in plain C: its free bytes, its blocks, and the memory behind them.
 *
 * Nothing here knows Python, so any thread may call it without the interpreter lock, and a thread sanitizer can watch
 * it (tests/objectstore/stress.c). One mutex guards the blocks. It is held for a few tree operations, and for a system
 * call only to get random numbers for 64 ids. A bitmap with atomic bits marks the committed granules, and another
 * bitmap the pinned ones, see `pin`.
 *
 * The rule: after releasing a lock, read every field again, beginning with `blocks`, which moves when it grows. Hold a
 * block that is used across the release.
 *
 *   blocks.c   free and held blocks: bins, best fit, coalescing (trees.h: the trees of blocks)
 *   ids.c      the ids by which peers name blocks
 *   extents.c  memory behind the blocks: committing it, and giving it back
 *   pins.c     memory that is never given back
 *   mapping.c  making and ending a heap
 *   forks.c    fork(2): memory that forked children see
 */
#ifndef ZCACTOR_HEAP_H
#define ZCACTOR_HEAP_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

#define GRANULE ((uint64_t)2 << 20) /* memory is committed in huge pages: a system call serves thousands of blocks */
#define PAGE ((uint64_t)sysconf(_SC_PAGESIZE)) /* kernels for aarch64 have pages of 4, 16 or 64 KiB; 9 ns */
#define BINS 256 /* size classes: four to each power of two */
#define NIL 0
#define RETIRED UINT32_MAX /* in place of a number of holders: neither held nor free, see forks.c */
#define ANONYMOUS (-2) /* in place of a descriptor: memory without a file */

typedef struct {
    uint64_t offset, size; /* bytes */
    uint64_t asked;        /* bytes requested, before rounding */
    uint64_t id;           /* the id by which peers name it; 0 until it is needed */
    uint32_t before, after;          /* neighbours in memory */
    uint32_t left, right, priority;  /* links in a tree; `left` also links unused records */
    uint32_t holders;                /* 0: free */
    int of_numpy;                    /* one of the holders is an array that owns its memory */
    int shown;                       /* the program has an array over it; always so for `of_numpy` */
    int seen;                        /* a forked child sees it: the pages are private, and it is not used again */
} block_t;

/* A control group that bounds our memory: its files with the limit, the memory in use and the statistics, and the
 * beginning `inactive` of the statistics' line with the bytes that can be dropped. */
typedef struct { char *limit, *usage, *statistics, *inactive; } group_t;

typedef struct heap {
    pthread_mutex_t lock;
    /* The locks are taken in this order, `lock` last. */
    pthread_mutex_t pinning;  /* one `pin` at a time; the heap is not closed meanwhile */
    pthread_mutex_t trimming; /* held while `trim` has taken a free block away */
    pthread_mutex_t punching; /* held from the check whether granules may be punched until they are */
    char *base; /* NULL: only an allocator of offsets, without memory */
    uint64_t nbytes;
    int anonymous; /* memory of this process alone, without a file: for simulations, which have many processes in one */
    uint64_t seed; /* seed of the ids, where they must be reproducible; 0 draws them from the system */
    int fd, closed, foreign; /* foreign: in a forked child, the heap of the parent */
    int busy_trimming;
    uint64_t extent;

    block_t *blocks;
    uint32_t nblocks, room, unused; /* records ever used, records allocated, and the list of unused records */
    uint32_t bins[BINS], all;
    uint64_t filled[BINS / 64];
    uint32_t tail; /* the block with the highest address */
    uint32_t spare; /* the block that NumPy freed last: not allocated, but not free yet; see `settle` */
    uint64_t capacity, used, of_numpy, count;
    uint64_t peak;  /* largest number of bytes in use since the last trim */
    uint64_t high, growth_limit; /* end of the highest block ever; `growth_fd` is written to above the limit */
    int growth_fd;
    uint64_t random; /* state of the random numbers for the treaps */
    uint32_t number, salts[64];
    unsigned nsalts;

    uint64_t *granules; /* bitmap of the committed granules */
    /* Bitmap of the pinned granules: written under `pinning`, `punching` and `lock`, so each of them suffices to read
     * it. */
    uint64_t *pins;
    uint64_t pinned, pinned_used; /* pinned bytes, and those of them that are allocated; under `lock` */
    uint64_t committed, idle_limit;
    int event_fd, told;
    int (*fallocate)(struct heap *, uint64_t offset, uint64_t nbytes); /* 0 or an errno */
    void *context;
    int can_populate, huge_on_advice, advice_ignored; /* see `huge_on_advice`, `advice_is_ignored` */
    group_t *groups; /* set once, before anything is committed */
    unsigned ngroups;
    uint64_t unchecked; /* bytes committed since the last check of the groups */
    /* forks.c; under `lock`. The numbers of the first and the last fork whose child sees a granule; 0: the granule is
     * shared. NULL before the first fork. */
    uint32_t *first_seen, *last_seen;
    uint64_t nprivate; /* private granules */
    uint64_t retired;  /* bytes of retired blocks */
    struct heap *next; /* list of all heaps, for fork */
} heap_t;

/* ---------------------------------------------------------------- committed and pinned granules */

static inline int is_committed(const heap_t *h, uint64_t granule) {
    return __atomic_load_n(h->granules + granule / 64, __ATOMIC_ACQUIRE) >> granule % 64 & 1;
}
static inline int is_pinned(const heap_t *h, uint64_t granule) { return h->pins[granule / 64] >> granule % 64 & 1; }
static inline uint64_t granule_end(const heap_t *h, uint64_t granule) {
    uint64_t stop = (granule + 1) * GRANULE;
    return stop < h->nbytes ? stop : h->nbytes;
}
/* Bytes of those granules of [offset, offset + nbytes) that are not committed. */
static inline uint64_t missing(const heap_t *h, uint64_t offset, uint64_t nbytes) {
    uint64_t sum = 0;
    for (uint64_t g = offset / GRANULE; g * GRANULE < offset + nbytes; g++)
        if (!is_committed(h, g)) sum += granule_end(h, g) - g * GRANULE;
    return sum;
}
static inline void close_fd(heap_t *h) {
    if (h->fd >= 0) close(h->fd);
    h->fd = -1;
}

/* Functions that the files share: hidden, so that a call is a direct one. */
#pragma GCC visibility push(hidden)

/* blocks.c; under the lock */
int have_records(heap_t *h, uint32_t n);
uint32_t cut(heap_t *h, uint32_t n, uint64_t size);
void join_after(heap_t *h, uint32_t n);
void add_free(heap_t *h, uint32_t n);
uint64_t tail_free(const heap_t *h);
uint64_t largest_free(const heap_t *h);
uint32_t free_before(const heap_t *h, uint64_t size, uint64_t offset);
void remove_free(heap_t *h, uint32_t n);
void coalesce(heap_t *h, uint32_t n);
void tell_of_growth(heap_t *h);
void tell_if_idle(heap_t *h);
uint64_t idle(const heap_t *h);
uint64_t used_in(const heap_t *h, uint64_t granule);
uint32_t block_from(const heap_t *h, uint64_t offset);
uint32_t block_next(const heap_t *h, uint64_t offset);
uint32_t block_around(const heap_t *h, uint64_t offset);
void settle(heap_t *h);
int grow(heap_t *h, uint64_t offset, uint64_t nbytes);
/* blocks.c; without the lock */
int64_t allocate_with_id(heap_t *h, uint64_t nbytes, uint64_t alignment, int of_numpy, uint64_t *id);
int release(heap_t *h, uint64_t offset, int of_numpy);
int resize(heap_t *h, uint64_t offset, uint64_t nbytes);

/* ids.c; under the lock */
uint64_t id_of(heap_t *h, uint32_t n);

/* extents.c; without the lock */
int posix_take(heap_t *h, uint64_t offset, uint64_t nbytes);
int huge_on_advice(void);
int advice_is_ignored(heap_t *h);
void set_committed(heap_t *h, uint64_t granule, int yes);
int populate_range(heap_t *h, uint64_t at, uint64_t nbytes);
int commit_range(heap_t *h, uint64_t low, uint64_t high, int populate);
int commit_surely(heap_t *h, uint64_t offset, uint64_t nbytes);
int commit_zeroed(heap_t *h, uint64_t offset, uint64_t nbytes);
uint64_t punch_block(heap_t *h, uint64_t offset, uint64_t size, uint64_t at_most);
uint64_t trim(heap_t *h, uint64_t keep, uint64_t at_most);

/* pins.c; without the lock */
int pin(heap_t *h, uint64_t offset, uint64_t nbytes);
void unpin_all(heap_t *h);

/* forks.c; under the lock */
int has_private(const heap_t *h, uint64_t offset, uint64_t size);
void retire(heap_t *h, uint32_t n);
uint64_t reclaim(heap_t *h);
/* forks.c; without the lock */
int watch_forks(void);
void add_heap(heap_t *h);
void remove_heap(heap_t *h);
int dup_of_child(void);
void reap_children(void);

/* mapping.c; without the lock */
heap_t *heap_new(int fd, uint64_t nbytes, uint64_t extent);
void heap_close(heap_t *h);
void heap_free(heap_t *h);
void free_groups(group_t *groups, size_t n);

#pragma GCC visibility pop

/* Allocate a block that has no id yet. */
static inline int64_t allocate(heap_t *h, uint64_t nbytes, uint64_t alignment, int of_numpy) {
    return allocate_with_id(h, nbytes, alignment, of_numpy, NULL);
}
#endif
