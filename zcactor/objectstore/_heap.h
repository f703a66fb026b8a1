/* The heap of an arena, in plain C: which bytes are free, who holds the others, and behind which there is memory.
 *
 * Nothing here knows Python, so that any thread may call it without the interpreter lock and a thread sanitizer can watch it
 * (tests/objectstore/stress.c). One mutex guards the blocks; it is held for a few tree operations, and for a system call only to
 * have random numbers for 64 ids. What is committed stands in a bitmap of its own, with atomic bits; what is pinned in another,
 * see `pin`.
 *
 * The rule: after a lock was let go, read every field again, `blocks` first, which moves when it grows; and hold a block that is
 * used across it.
 *
 * Blocks: best fit with immediate coalescing, the lowest address among equals. A free block stands in the tree of its size
 * class, ordered by (size, offset); an allocated one in the tree of all, ordered by offset. Both are treaps (Seidel and
 * Aragon, Randomized Search Trees, 1996): O(log n), and one pair of links serves both, for no block is in two. Neighbours in
 * memory are linked (Knuth's boundary tags, kept beside the memory instead of in it, which peers can write to).
 */
#ifndef ZCACTOR_HEAP_H
#define ZCACTOR_HEAP_H
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* since Linux 5.14 */
#endif
#define GRANULE ((uint64_t)2 << 20)  /* memory is committed in huge pages: small blocks cost a system call once in thousands */
#define CHUNK ((uint64_t)16 << 20)   /* bytes per fallocate(2), which a signal makes the kernel undo and us repeat */
#define PARALLEL ((uint64_t)32 << 20) /* from here on several threads commit: starting one costs 50 us, 32 MiB take 10 ms */
#define CHECKED ((uint64_t)16 << 20) /* bytes that are committed between two looks at the control groups, and kept free in them */
#define MAX_THREADS 4                /* they reach the bandwidth of one socket */
#define PAGE ((uint64_t)4096)
#define BINS 256                     /* size classes: four to each power of two */
#define NIL 0

typedef struct {
    uint64_t offset, size; /* bytes */
    uint64_t asked;        /* bytes asked for, before rounding */
    uint64_t id;           /* what peers call it; 0 until somebody asks */
    uint32_t before, after;          /* neighbours in memory */
    uint32_t left, right, priority;  /* in a tree; `left` also links unused records */
    uint32_t holders;                /* 0: free */
    int of_numpy;                    /* one of the holders is an array that owns its memory */
} block_t;

/* A control group that bounds our memory: the files with its limit and with what it uses, and its statistics, where the line
 * that begins with `inactive` says how much of that can be dropped. */
typedef struct { char *limit, *usage, *statistics, *inactive; } group_t;

typedef struct heap {
    pthread_mutex_t lock;
    /* Taken in this order, `lock` last. */
    pthread_mutex_t pinning;  /* one `pin` at a time; the heap is not closed meanwhile */
    pthread_mutex_t trimming; /* held while `trim` has taken a free block away */
    pthread_mutex_t punching; /* held from the look whether granules may go until they are gone */
    char *base; /* NULL: an allocator of offsets, without memory */
    uint64_t nbytes;
    int anonymous; /* memory of this process alone, without a file: for simulations, whose processes are many in one */
    uint64_t seed; /* of the ids, where they are to be foretold; 0 draws them from the system */
    int fd, closed, foreign; /* foreign: in a forked child, of the parent's heap */
    int busy_trimming;
    uint64_t extent;

    block_t *blocks;
    uint32_t nblocks, room, unused; /* records ever used, allocated, and the list of those free for use */
    uint32_t bins[BINS], all;
    uint64_t filled[BINS / 64];
    uint32_t tail; /* the block with the highest address */
    uint32_t spare; /* what NumPy freed last: not allocated, but not free yet either; see `settle` */
    uint64_t capacity, used, of_numpy, count;
    uint64_t peak;  /* most bytes used since the last trim */
    uint64_t high, growth_limit; /* one past the highest byte ever handed out; beyond which one it is told, see `note_used` */
    int growth_fd;
    uint64_t random; /* of the treaps */
    uint32_t number, salts[64];
    unsigned nsalts;

    uint64_t *granules; /* bitmap of what is committed */
    uint64_t *pins;     /* and of what is pinned: written under `pinning`, `punching` and `lock`, so that one of them is enough to read */
    uint64_t pinned, pinned_used; /* bytes, and those of them that are allocated; under `lock` */
    uint64_t committed, idle_limit;
    int event_fd, told;
    int (*fallocate)(struct heap *, uint64_t offset, uint64_t nbytes); /* 0 or an errno */
    void *context;
    int can_populate, huge_on_advice;
    group_t *groups; /* set once, before anything is committed */
    unsigned ngroups;
    uint64_t unchecked; /* bytes committed since the groups were looked at */
    struct heap *next; /* all heaps, for fork */
} heap_t;

/* ---------------------------------------------------------------- trees */

static inline int bin_of(uint64_t size) {
    int e = 63 - __builtin_clzll(size);
    return e * 4 + (int)(e >= 2 ? size >> (e - 2) & 3 : 0);
}
/* Whether block `n` comes before (size, offset); without a size, before (offset). */
static inline int precedes(const heap_t *h, uint32_t n, uint64_t size, uint64_t offset, int by_size) {
    const block_t *b = h->blocks + n;
    return by_size && b->size != size ? b->size < size : b->offset < offset;
}
static void tree_split(heap_t *h, uint32_t root, const block_t *at, int by_size, uint32_t *low, uint32_t *high) {
    if (root == NIL) { *low = *high = NIL; return; }
    if (precedes(h, root, at->size, at->offset, by_size)) {
        *low = root;
        tree_split(h, h->blocks[root].right, at, by_size, &h->blocks[root].right, high);
    } else {
        *high = root;
        tree_split(h, h->blocks[root].left, at, by_size, low, &h->blocks[root].left);
    }
}
static uint32_t tree_join(heap_t *h, uint32_t low, uint32_t high) {
    if (low == NIL || high == NIL) return low ? low : high;
    if (h->blocks[low].priority > h->blocks[high].priority) {
        h->blocks[low].right = tree_join(h, h->blocks[low].right, high);
        return low;
    }
    h->blocks[high].left = tree_join(h, low, h->blocks[high].left);
    return high;
}
static void tree_insert(heap_t *h, uint32_t *root, uint32_t n, int by_size) {
    block_t *b = h->blocks + n;
    h->random ^= h->random << 13, h->random ^= h->random >> 7, h->random ^= h->random << 17;
    b->priority = (uint32_t)(h->random >> 32);
    while (*root != NIL && h->blocks[*root].priority >= b->priority)
        root = precedes(h, *root, b->size, b->offset, by_size) ? &h->blocks[*root].right : &h->blocks[*root].left;
    uint32_t low, high;
    tree_split(h, *root, b, by_size, &low, &high);
    b->left = low;
    b->right = high;
    *root = n;
}
static void tree_remove(heap_t *h, uint32_t *root, uint32_t n, int by_size) {
    const block_t *b = h->blocks + n;
    while (*root != n) root = precedes(h, *root, b->size, b->offset, by_size) ? &h->blocks[*root].right : &h->blocks[*root].left;
    *root = tree_join(h, b->left, b->right);
}
/* The first block that does not come before (size, offset). */
static uint32_t tree_first(const heap_t *h, uint32_t root, uint64_t size, uint64_t offset, int by_size) {
    uint32_t best = NIL;
    while (root != NIL) {
        if (precedes(h, root, size, offset, by_size)) root = h->blocks[root].right;
        else { best = root; root = h->blocks[root].left; }
    }
    return best;
}

/* ---------------------------------------------------------------- records */

/* Room for `n` more records. 0, or -1: no memory. */
static int have_records(heap_t *h, uint32_t n) {
    uint32_t there = 0;
    for (uint32_t i = h->unused; i != NIL && there < n; i = h->blocks[i].left) there++;
    if (there + (h->room - h->nblocks) >= n) return 0;
    uint32_t room = h->room ? h->room * 2 : 64;
    if (room > UINT32_MAX / 2) return -1;
    block_t *blocks = realloc(h->blocks, room * sizeof *blocks);
    if (!blocks) return -1;
    h->blocks = blocks;
    h->room = room;
    if (h->nblocks == 0) h->nblocks = 1; /* NIL */
    return 0;
}
static uint32_t new_record(heap_t *h, uint64_t offset, uint64_t size) {
    uint32_t n = h->unused;
    if (n != NIL) h->unused = h->blocks[n].left;
    else n = h->nblocks++;
    block_t made = {.offset = offset, .size = size};
    h->blocks[n] = made;
    return n;
}
static void drop_record(heap_t *h, uint32_t n) {
    h->blocks[n].left = h->unused;
    h->blocks[n].size = 0; /* how one knows it */
    h->unused = n;
}

/* ---------------------------------------------------------------- free blocks */

static void add_free(heap_t *h, uint32_t n) {
    int bin = bin_of(h->blocks[n].size);
    h->blocks[n].holders = 0;
    tree_insert(h, h->bins + bin, n, 1);
    h->filled[bin / 64] |= 1ull << bin % 64;
}
static void remove_free(heap_t *h, uint32_t n) {
    int bin = bin_of(h->blocks[n].size);
    tree_remove(h, h->bins + bin, n, 1);
    if (h->bins[bin] == NIL) h->filled[bin / 64] &= ~(1ull << bin % 64);
}
static int next_bin(const heap_t *h, int bin) {
    for (int word = bin / 64, first = bin % 64; word < BINS / 64; word++, first = 0) {
        uint64_t bits = h->filled[word] & ~0ull << first;
        if (bits) return word * 64 + __builtin_ctzll(bits);
    }
    return BINS;
}
static uint32_t largest_block(const heap_t *h) {
    for (int word = BINS / 64 - 1; word >= 0; word--)
        if (h->filled[word]) {
            uint32_t n = h->bins[word * 64 + 63 - __builtin_clzll(h->filled[word])];
            while (h->blocks[n].right != NIL) n = h->blocks[n].right;
            return n;
        }
    return NIL;
}
static uint64_t tail_free(const heap_t *h) {
    return h->tail != NIL && h->blocks[h->tail].holders == 0 ? h->blocks[h->tail].size : 0;
}
static uint64_t largest_free(const heap_t *h) {
    uint32_t n = largest_block(h);
    uint64_t size = n == NIL ? 0 : h->blocks[n].size;
    if (h->base) { /* what is not handed out yet joins the tail */
        uint64_t end = tail_free(h) + h->nbytes - h->capacity;
        if (end > size) size = end;
    }
    return size;
}
/* Cut block `n` after `size` bytes; the rest becomes a record of its own, in no tree. */
static uint32_t cut(heap_t *h, uint32_t n, uint64_t size) {
    uint32_t rest = new_record(h, h->blocks[n].offset + size, h->blocks[n].size - size);
    block_t *b = h->blocks + n, *r = h->blocks + rest;
    r->before = n;
    r->after = b->after;
    if (b->after != NIL) h->blocks[b->after].before = rest;
    b->after = rest;
    b->size = size;
    if (h->tail == n) h->tail = rest;
    return rest;
}
/* Join block `n` with the one behind it, which is in no tree. */
static void join_after(heap_t *h, uint32_t n) {
    block_t *b = h->blocks + n;
    uint32_t gone = b->after;
    b->size += h->blocks[gone].size;
    b->after = h->blocks[gone].after;
    if (b->after != NIL) h->blocks[b->after].before = n;
    if (h->tail == gone) h->tail = n;
    drop_record(h, gone);
}
/* Make `n`, in no tree, free, as one block with the free ones beside it. */
static void coalesce(heap_t *h, uint32_t n) {
    uint32_t before = h->blocks[n].before, after = h->blocks[n].after;
    if (after != NIL && h->blocks[after].holders == 0) { remove_free(h, after); join_after(h, n); }
    if (before != NIL && h->blocks[before].holders == 0) { remove_free(h, before); join_after(h, before); n = before; }
    add_free(h, n);
}
static int is_pinned(const heap_t *h, uint64_t granule) { return h->pins[granule / 64] >> granule % 64 & 1; }
/* Bytes of [offset, offset + size) that are pinned. */
static uint64_t pinned_in(const heap_t *h, uint64_t offset, uint64_t size) {
    uint64_t sum = 0, stop = offset + size;
    for (uint64_t g = offset / GRANULE; h->pinned && g * GRANULE < stop; g++)
        if (is_pinned(h, g)) {
            uint64_t low = g * GRANULE, high = low + GRANULE;
            sum += (high < stop ? high : stop) - (low > offset ? low : offset);
        }
    return sum;
}
/* Make the eventfd readable, once, when a block was handed out that ends above the limit. Called under the lock. */
static void tell_of_growth(heap_t *h) {
    uint64_t one = 1;
    if (h->growth_fd >= 0 && h->high > h->growth_limit && write(h->growth_fd, &one, sizeof one) == sizeof one) h->growth_fd = -1;
}
/* The block at `offset` takes up `now` bytes, after `before`: 0 for one that is not allocated. */
static void note_used(heap_t *h, uint64_t offset, uint64_t before, uint64_t now) {
    h->used += now - before;
    h->pinned_used += pinned_in(h, offset, now) - pinned_in(h, offset, before);
    if (h->used > h->peak) h->peak = h->used;
    if (now && offset + now > h->high) { h->high = offset + now; tell_of_growth(h); }
}

/* ---------------------------------------------------------------- the allocator; called under the lock */

static uint32_t take(heap_t *h, uint64_t nbytes, uint64_t alignment) {
    uint64_t size = (nbytes + alignment - 1) & -alignment;
    if (size < nbytes || have_records(h, 2) < 0) return NIL;
    uint64_t from_size = size, from_offset = 0;
    for (int bin = next_bin(h, bin_of(size)); bin < BINS; bin = next_bin(h, bin + 1), from_size = from_offset = 0)
        for (uint32_t n; (n = tree_first(h, h->bins[bin], from_size, from_offset, 1)) != NIL;) {
            uint64_t offset = h->blocks[n].offset, skip = -offset & (alignment - 1);
            if (skip > h->blocks[n].size || h->blocks[n].size - skip < size) {
                from_size = h->blocks[n].size;
                from_offset = offset + 1;
                continue;
            }
            remove_free(h, n);
            if (skip) {
                uint32_t rest = cut(h, n, skip);
                add_free(h, n);
                n = rest;
            }
            if (h->blocks[n].size > size) add_free(h, cut(h, n, size));
            block_t *b = h->blocks + n;
            b->holders = 1;
            b->asked = nbytes;
            b->id = 0;
            b->of_numpy = 0;
            tree_insert(h, &h->all, n, 0);
            h->count++;
            note_used(h, b->offset, 0, size);
            return n;
        }
    return NIL;
}
static uint32_t block_from(const heap_t *h, uint64_t offset) {
    uint32_t n = tree_first(h, h->all, 0, offset, 0);
    return n != NIL && n != h->spare && h->blocks[n].offset == offset ? n : NIL;
}
/* The allocated block that `offset` lies in. */
static uint32_t block_around(const heap_t *h, uint64_t offset) {
    uint32_t n = h->all, best = NIL;
    while (n != NIL) {
        if (h->blocks[n].offset <= offset) { best = n; n = h->blocks[n].right; }
        else n = h->blocks[n].left;
    }
    return best != NIL && best != h->spare && offset - h->blocks[best].offset < h->blocks[best].size ? best : NIL;
}
/* NumPy frees a temporary and asks for as much again, over and over. So what it freed last stays as it is, in the tree of what
 * is allocated, and is taken again in a few nanoseconds. Whoever looks for free blocks settles it first: then it is free. */
static void settle(heap_t *h) {
    uint32_t n = h->spare;
    if (n == NIL) return;
    h->spare = NIL;
    tree_remove(h, &h->all, n, 0);
    coalesce(h, n);
}
static void give_back(heap_t *h, uint32_t n) {
    tree_remove(h, &h->all, n, 0);
    h->count--;
    note_used(h, h->blocks[n].offset, h->blocks[n].size, 0);
    coalesce(h, n);
}
/* Add [offset, offset + nbytes): 0, EINVAL: empty or overlaps, ENOMEM. */
static int grow(heap_t *h, uint64_t offset, uint64_t nbytes) {
    uint64_t stop = offset + nbytes;
    settle(h);
    if (nbytes == 0 || stop < offset || stop > INT64_MAX) return EINVAL;
    if (have_records(h, 1) < 0) return ENOMEM;
    uint32_t before = NIL, after = NIL;
    const block_t *tail = h->blocks + h->tail;
    if (h->tail != NIL && offset >= tail->offset + tail->size) {
        if (offset == tail->offset + tail->size) before = h->tail;
    } else
        for (uint32_t n = 1; n < h->nblocks; n++) { /* rare: an extent below others */
            const block_t *b = h->blocks + n;
            if (b->size == 0) continue;
            if (b->offset < stop && offset < b->offset + b->size) return EINVAL;
            if (b->offset + b->size == offset) before = n;
            if (b->offset == stop) after = n;
        }
    uint32_t n = new_record(h, offset, nbytes);
    h->blocks[n].before = before;
    h->blocks[n].after = after;
    if (before != NIL) h->blocks[before].after = n;
    if (after != NIL) h->blocks[after].before = n;
    if (h->tail == NIL || offset > h->blocks[h->tail].offset) h->tail = n;
    h->capacity += nbytes;
    coalesce(h, n);
    return 0;
}
/* `take`, growing by extents: the end of the arena that nobody has touched must not be among the free blocks, or a best fit
 * would sometimes prefer it to holes that are warm. */
static uint32_t place(heap_t *h, uint64_t nbytes, uint64_t alignment) {
    uint32_t n = take(h, nbytes, alignment);
    if (n != NIL || !h->base) return n;
    uint64_t size = (nbytes + alignment - 1) & -alignment, tail = h->capacity - tail_free(h), start = (tail + alignment - 1) & -alignment;
    if (size < nbytes || start < tail || start > h->nbytes || size > h->nbytes - start) return NIL; /* nor would the whole arena do */
    /* It ends with a granule: memory of one that reaches beyond what is handed out could not be given back. */
    uint64_t end = start + size, least = h->nbytes - h->capacity < h->extent ? h->nbytes : h->capacity + h->extent;
    uint64_t step = h->extent < GRANULE ? PAGE : GRANULE;
    if (end < least) end = least;
    end = h->nbytes - end < step ? h->nbytes : (end + step - 1) & -step;
    if (grow(h, h->capacity, end - h->capacity)) return NIL;
    return take(h, nbytes, alignment);
}
/* Random bytes from the system. Without any the process ends: an id that can be guessed is worse than none. */
static void have_random(void *to, size_t nbytes) {
    size_t got = 0;
    ssize_t more = 1;
    while (got < nbytes && (more > 0 || errno == EINTR))
        if ((more = getrandom((char *)to + got, nbytes - got, 0)) > 0) got += (size_t)more;
    if (got == nbytes) return;
    int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC); /* a sandbox may know files and no getrandom(2) */
    more = fd < 0 ? 0 : 1;
    while (got < nbytes && (more > 0 || (more < 0 && errno == EINTR)))
        if ((more = read(fd, (char *)to + got, nbytes - got)) > 0) got += (size_t)more;
    if (fd >= 0) close(fd);
    if (got == nbytes) return;
    fprintf(stderr, "zcactor: neither getrandom(2) nor /dev/urandom gives random bytes, which ids of objects are made of: allow one\n");
    abort();
}
/* The same from a seed (splitmix64). */
static void seeded(heap_t *h) {
    for (unsigned i = 0; i < sizeof h->salts / sizeof *h->salts; i++) {
        uint64_t z = h->seed += 0x9e3779b97f4a7c15;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        h->salts[i] = (uint32_t)((z ^ z >> 31) >> 32);
    }
}
/* An id that a peer cannot guess: 32 bits of a counter and 32 random ones. It comes again only after 2**32 objects, and then
 * with a probability of 2**-32. */
static uint64_t id_of(heap_t *h, uint32_t n) {
    if (h->blocks[n].id == 0) {
        if (h->nsalts == 0) {
            if (h->seed) seeded(h);
            else have_random(h->salts, sizeof h->salts);
            h->nsalts = sizeof h->salts / sizeof *h->salts;
        }
        if (++h->number == 0) h->number = 1;
        h->blocks[n].id = (uint64_t)h->number << 32 | h->salts[--h->nsalts];
    }
    return h->blocks[n].id;
}

/* ---------------------------------------------------------------- memory behind the blocks; no lock */

static int is_committed(heap_t *h, uint64_t granule) {
    return __atomic_load_n(h->granules + granule / 64, __ATOMIC_ACQUIRE) >> granule % 64 & 1;
}
static uint64_t granule_end(const heap_t *h, uint64_t granule) {
    uint64_t stop = (granule + 1) * GRANULE;
    return stop < h->nbytes ? stop : h->nbytes;
}
static void set_committed(heap_t *h, uint64_t granule, int yes) {
    uint64_t bit = 1ull << granule % 64, nbytes = granule_end(h, granule) - granule * GRANULE;
    uint64_t before = yes ? __atomic_fetch_or(h->granules + granule / 64, bit, __ATOMIC_ACQ_REL)
                          : __atomic_fetch_and(h->granules + granule / 64, ~bit, __ATOMIC_ACQ_REL);
    if (!(before & bit) == !yes) return;
    if (yes) __atomic_fetch_add(&h->committed, nbytes, __ATOMIC_RELAXED);
    else __atomic_fetch_sub(&h->committed, nbytes, __ATOMIC_RELAXED);
}
static int posix_take(heap_t *h, uint64_t offset, uint64_t nbytes) {
    int code;
    if (h->anonymous) return 0; /* page faults find the memory */
    do code = posix_fallocate(h->fd, (off_t)offset, (off_t)nbytes);
    while (code == EINTR);
    return code;
}
/* Enter pages into the page table, as if they were written to; 0, an errno, or -1: the kernel cannot (before Linux 5.14). */
static int populate_range(heap_t *h, uint64_t at, uint64_t nbytes) {
    if (!__atomic_load_n(&h->can_populate, __ATOMIC_RELAXED)) return -1;
    while (madvise(h->base + at, nbytes, MADV_POPULATE_WRITE)) {
        if (errno == EINTR || errno == EAGAIN) continue;
        if (errno != EINVAL) return errno;
        __atomic_store_n(&h->can_populate, 0, __ATOMIC_RELAXED);
        return -1;
    }
    return 0;
}
/* fallocate(2) is faster than faults for small pages, and gives huge ones only where they need no advice. */
static int commit_range(heap_t *h, uint64_t low, uint64_t high, int populate) {
    for (uint64_t at = low; at < high; at += CHUNK) {
        uint64_t nbytes = high - at < CHUNK ? high - at : CHUNK;
        int code = h->huge_on_advice ? populate_range(h, at, nbytes) : -1;
        if (code < 0) {
            if ((code = h->fallocate(h, at, nbytes))) return code;
            if (populate && (code = populate_range(h, at, nbytes)) < 0) code = 0; /* page faults find the memory there */
        }
        if (code) return code;
    }
    return 0;
}
static int huge_on_advice(void) {
    char text[128];
    int fd = open("/sys/kernel/mm/transparent_hugepage/shmem_enabled", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    text[n < 0 ? 0 : n] = 0;
    return strstr(text, "[advise]") != NULL;
}
typedef struct { heap_t *heap; uint64_t low, high; int code, started; pthread_t thread; } part_t;
static void *commit_part(void *arg) {
    part_t *part = arg;
    part->code = commit_range(part->heap, part->low, part->high, 1);
    return NULL;
}
static int commit_parallel(heap_t *h, uint64_t low, uint64_t high) {
    cpu_set_t cpus;
    int n = sched_getaffinity(0, sizeof cpus, &cpus) ? 1 : CPU_COUNT(&cpus);
    if (n > MAX_THREADS) n = MAX_THREADS;
    part_t parts[MAX_THREADS];
    uint64_t each = ((high - low) / (uint64_t)n + GRANULE - 1) / GRANULE * GRANULE;
    for (int i = 0; i < n; i++) {
        uint64_t start = low + each * (uint64_t)i;
        part_t part = {.heap = h, .low = start < high ? start : high, .high = start + each < high ? start + each : high};
        parts[i] = part;
        parts[i].started = i && pthread_create(&parts[i].thread, NULL, commit_part, parts + i) == 0;
    }
    int code = 0;
    for (int i = 0; i < n; i++) {
        if (parts[i].started) pthread_join(parts[i].thread, NULL);
        else commit_part(parts + i);
        if (parts[i].code) code = parts[i].code;
    }
    return code;
}
/* Bytes of the granules of [offset, offset + nbytes) that are not committed. */
static uint64_t missing(heap_t *h, uint64_t offset, uint64_t nbytes) {
    uint64_t sum = 0;
    for (uint64_t g = offset / GRANULE; g * GRANULE < offset + nbytes; g++)
        if (!is_committed(h, g)) sum += granule_end(h, g) - g * GRANULE;
    return sum;
}
/* The number in a file, or in its line that begins with `key` and a blank; -1 where there is none, or no limit ("max"). */
static int64_t number_in(const char *path, const char *key) {
    char text[8192];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    if (n <= 0) return -1;
    text[n] = 0;
    char *at = text;
    for (size_t length = key ? strlen(key) : 0; length && (strncmp(at, key, length) || at[length] != ' ');) {
        if (!(at = strchr(at, '\n'))) return -1;
        at++;
    }
    if (key) at += strlen(key) + 1;
    if (*at < '0' || *at > '9') return -1;
    unsigned long long value = strtoull(at, NULL, 10);
    return value > INT64_MAX ? -1 : (int64_t)value;
}
/* Whether a control group has not `nbytes` left, and CHECKED for what is not looked at: to take them would get a process of the
 * group killed. Another one may take the rest a moment later; the kernel has no way to ask and take in one step. */
static int exceeds_groups(heap_t *h, uint64_t nbytes) {
    if (h->ngroups == 0 || nbytes == 0 || __atomic_add_fetch(&h->unchecked, nbytes, __ATOMIC_RELAXED) < CHECKED) return 0;
    for (unsigned i = 0; i < h->ngroups; i++) {
        group_t *group = h->groups + i;
        int64_t limit = number_in(group->limit, NULL), usage = limit < 0 ? -1 : number_in(group->usage, NULL);
        if (usage < 0) continue;
        int64_t inactive = number_in(group->statistics, group->inactive);
        if (limit - usage + (inactive < 0 ? 0 : inactive) < (int64_t)(nbytes + CHECKED)) {
            __atomic_store_n(&h->unchecked, CHECKED, __ATOMIC_RELAXED); /* whatever comes next is looked at, too */
            return 1;
        }
    }
    __atomic_store_n(&h->unchecked, 0, __ATOMIC_RELAXED);
    return 0;
}
static int punch(heap_t *h, uint64_t low, uint64_t high) {
    return madvise(h->base + low, high - low, h->anonymous ? MADV_DONTNEED : MADV_REMOVE) ? errno : 0;
}
/* Memory behind [offset, offset + nbytes), which the caller owns; 0 or an errno, EDQUOT for a control group's limit. What was taken on the way is given back then. A
 * granule at either end may be taken by a neighbour at the same time, which is harmless: fallocate does not write. */
static int commit(heap_t *h, uint64_t offset, uint64_t nbytes) {
    if (nbytes == 0) return 0;
    if (exceeds_groups(h, missing(h, offset, nbytes))) return EDQUOT;
    uint64_t first = offset / GRANULE, last = (offset + nbytes - 1) / GRANULE;
    for (uint64_t g = first; g <= last; g++) {
        if (is_committed(h, g)) continue;
        uint64_t stop = g + 1;
        while (stop <= last && !is_committed(h, stop)) stop++;
        uint64_t low = g * GRANULE, high = granule_end(h, stop - 1);
        int code = high - low >= PARALLEL ? commit_parallel(h, low, high) : commit_range(h, low, high, high - low > GRANULE);
        if (code) {
            uint64_t inner = (offset + GRANULE - 1) / GRANULE * GRANULE, end = (offset + nbytes) / GRANULE * GRANULE;
            if (low < inner) low = inner;
            if (high > end) high = end;
            for (; low < high; low += GRANULE) { /* only `pin` commits inside, too; what fails here stays the file's, unused */
                pthread_mutex_lock(&h->punching);
                if (!is_committed(h, low / GRANULE) && !is_pinned(h, low / GRANULE)) punch(h, low, low + GRANULE);
                pthread_mutex_unlock(&h->punching);
            }
            return code;
        }
        for (; g < stop; g++) set_committed(h, g, 1);
    }
    return 0;
}
static uint64_t trim(heap_t *h, uint64_t keep, uint64_t at_most);
/* `commit`, and when the system has no memory left once more, after what lies idle here was given back. */
static int commit_surely(heap_t *h, uint64_t offset, uint64_t nbytes) {
    int code = commit(h, offset, nbytes);
    if (code && code != EIO && trim(h, 0, UINT64_MAX)) code = commit(h, offset, nbytes);
    return code;
}
/* Zero [offset, offset + nbytes) and commit it, writing only where there was memory before: fresh pages are zero. */
static int commit_zeroed(heap_t *h, uint64_t offset, uint64_t nbytes) {
    uint64_t stop = offset + nbytes;
    for (uint64_t g = offset / GRANULE; g * GRANULE < stop; g++) {
        if (!is_committed(h, g)) continue; /* our part of it is as the kernel made it, whoever commits it now */
        uint64_t low = g * GRANULE > offset ? g * GRANULE : offset, high = granule_end(h, g) < stop ? granule_end(h, g) : stop;
        memset(h->base + low, 0, high - low);
    }
    return commit_surely(h, offset, nbytes);
}
static int may_go(heap_t *h, uint64_t granule) { return is_committed(h, granule) && !is_pinned(h, granule); }
/* Punch a granule where the system takes no more at once, as where pages are locked by mlock(2): then it may have taken those before
 * them. Returns bytes given back, or 0: the granule is committed as before. Nobody needs its bytes. */
static uint64_t punch_granule(heap_t *h, uint64_t granule) {
    uint64_t low = granule * GRANULE, high = granule_end(h, granule);
    if (punch(h, low, high)) {
        if (posix_take(h, low, high - low) == 0) return 0;
        /* No memory for what is missing now: the rest goes as far as it can, and what stays is zero as what comes back will be. */
        for (uint64_t at = low; at < high; at += PAGE)
            if (punch(h, at, at + PAGE)) memset(h->base + at, 0, PAGE);
    }
    set_committed(h, granule, 0);
    return high - low;
}
/* Punch the topmost granules of [first, *stop) that may go and lie together, no more than `room` bytes; *stop becomes where they
 * began. Returns bytes given back; 0: there are none, or the system refuses. */
static uint64_t punch_top(heap_t *h, uint64_t first, uint64_t *stop, uint64_t room) {
    uint64_t given = 0;
    pthread_mutex_lock(&h->punching);
    while (*stop > first && !may_go(h, *stop - 1)) --*stop;
    if (*stop > first) {
        uint64_t low = *stop, to = granule_end(h, low - 1);
        while (low > first && to - (low - 1) * GRANULE <= room && may_go(h, low - 1)) low--;
        if (low < *stop && punch(h, low * GRANULE, to) == 0) {
            for (uint64_t g = low; g < *stop; g++) set_committed(h, g, 0);
            given = to - low * GRANULE;
        } else
            for (uint64_t g = *stop; g > low; g--) given += punch_granule(h, g - 1);
        *stop = low;
    }
    pthread_mutex_unlock(&h->punching);
    return given;
}
/* Punch whole granules of a block that the caller owns, no more than `at_most` bytes. Returns bytes given back. */
static uint64_t punch_block(heap_t *h, uint64_t offset, uint64_t size, uint64_t at_most) {
    uint64_t first = (offset + GRANULE - 1) / GRANULE, stop = (offset + size) / GRANULE, given = 0, more;
    if (offset + size == h->nbytes) stop = (h->nbytes + GRANULE - 1) / GRANULE;
    do { /* from the top: what stays warm lies low, where the next allocation looks */
        more = punch_top(h, first, &stop, at_most - given < CHUNK ? at_most - given : CHUNK);
        given += more;
    } while (more);
    return given;
}
/* The last free block that comes before (size, offset). */
static uint32_t free_before(const heap_t *h, uint64_t size, uint64_t offset) {
    uint32_t best = NIL;
    for (int bin = bin_of(size); bin >= 0 && best == NIL; bin--)
        for (uint32_t n = h->bins[bin]; n != NIL;)
            if (precedes(h, n, size, offset, 1)) { best = n; n = h->blocks[n].right; }
            else n = h->blocks[n].left;
    return best;
}
/* Give back memory of free blocks, the largest first, as long as at least `keep` bytes stay committed, and at most `at_most` at
 * a time. Returns bytes given back. */
static uint64_t trim(heap_t *h, uint64_t keep, uint64_t at_most) {
    uint64_t given = 0, size = UINT64_MAX, offset = 0;
    while (given < at_most && !h->foreign) {
        pthread_mutex_lock(&h->trimming);
        pthread_mutex_lock(&h->lock);
        settle(h);
        uint32_t n = free_before(h, size, offset);
        uint64_t committed = __atomic_load_n(&h->committed, __ATOMIC_RELAXED);
        if (n == NIL || h->blocks[n].size < GRANULE || committed <= keep) {
            pthread_mutex_unlock(&h->lock);
            pthread_mutex_unlock(&h->trimming);
            break;
        }
        h->busy_trimming = 1;
        remove_free(h, n);
        h->blocks[n].holders = 1; /* ours while the lock is open */
        offset = h->blocks[n].offset;
        size = h->blocks[n].size;
        uint64_t excess = committed - keep;
        pthread_mutex_unlock(&h->lock);
        given += punch_block(h, offset, size, at_most - given < excess ? at_most - given : excess);
        pthread_mutex_lock(&h->lock);
        h->busy_trimming = 0;
        coalesce(h, n);
        pthread_mutex_unlock(&h->lock);
        pthread_mutex_unlock(&h->trimming);
    }
    return given;
}

/* ---------------------------------------------------------------- pinned memory */

/* Bytes of the blocks in use that lie in the granule. Called under the lock. */
static uint64_t used_in(const heap_t *h, uint64_t granule) {
    uint64_t low = granule * GRANULE, high = granule_end(h, granule), sum = 0, at = low;
    uint32_t n = block_around(h, low);
    if (n != NIL) at = h->blocks[n].offset;
    while ((n = tree_first(h, h->all, 0, at, 0)) != NIL && h->blocks[n].offset < high) {
        uint64_t from = h->blocks[n].offset;
        at = from + h->blocks[n].size;
        if (n != h->spare) sum += (at < high ? at : high) - (from > low ? from : low);
    }
    return sum;
}
/* 0 or an errno. */
static int set_pinned(heap_t *h, uint64_t granule, int yes) {
    uint64_t end = granule_end(h, granule), nbytes = end - granule * GRANULE;
    pthread_mutex_lock(&h->punching); /* whoever punches sees it from here on, or has punched */
    pthread_mutex_lock(&h->lock);
    /* Among the free blocks: it is warm now, and goes back by `trim` once it is unpinned. */
    int code = end > h->capacity ? grow(h, h->capacity, end - h->capacity) : 0;
    if (code == 0) {
        h->pins[granule / 64] ^= 1ull << granule % 64;
        h->pinned += yes ? nbytes : -nbytes;
        h->pinned_used += yes ? used_in(h, granule) : -used_in(h, granule);
    }
    pthread_mutex_unlock(&h->lock);
    pthread_mutex_unlock(&h->punching);
    return code;
}
/* Memory behind a granule that belongs to anybody or nobody, in the page table; 0 or an errno. */
static int populate(heap_t *h, uint64_t granule) {
    uint64_t low = granule * GRANULE, high = granule_end(h, granule);
    int code = is_committed(h, granule) ? populate_range(h, low, high - low) : commit_range(h, low, high, 1);
    if (code > 0) return code; /* what was taken of the granule stays the file's: its owner may be committing it just now */
    set_committed(h, granule, 1);
    return 0;
}
/* A network card reads and writes the pages themselves, which stay its own when the file gets others: what is registered with it
 * must never be punched. Commits the granules of [offset, offset + nbytes), whoever owns them, and keeps them: each is marked
 * first, under the lock without which nothing is punched, and then populated with no lock that others want. 0, an errno, after
 * which no more is pinned than before, or -1: the heap is closed. */
static int pin(heap_t *h, uint64_t offset, uint64_t nbytes) {
    uint64_t first = offset / GRANULE, stop = nbytes ? (offset + nbytes - 1) / GRANULE + 1 : first;
    uint64_t *made = calloc((stop - first) / 64 + 1, sizeof *made);
    if (!made) return ENOMEM;
    pthread_mutex_lock(&h->pinning);
    int code = h->closed ? -1 : 0;
    for (uint64_t g = first; g < stop && !code; g++) {
        if (is_pinned(h, g)) continue;
        if ((code = set_pinned(h, g, 1))) break;
        made[(g - first) / 64] |= 1ull << (g - first) % 64;
        code = populate(h, g);
        if (code && code != EIO && trim(h, 0, UINT64_MAX)) code = populate(h, g);
    }
    for (uint64_t g = first; g < stop && code; g++)
        if (made[(g - first) / 64] >> (g - first) % 64 & 1) set_pinned(h, g, 0);
    pthread_mutex_unlock(&h->pinning);
    free(made);
    if (code > 0) trim(h, 0, UINT64_MAX);
    return code;
}

/* ---------------------------------------------------------------- allocations with memory */

static void close_fd(heap_t *h) {
    if (h->fd >= 0) close(h->fd);
    h->fd = -1;
}

/* A block of `nbytes` with one holder; its offset, or -1: nothing fits, or the heap is closed. It has no memory yet. */
static int64_t allocate(heap_t *h, uint64_t nbytes, uint64_t alignment, int of_numpy) {
    pthread_mutex_lock(&h->lock);
    uint32_t n = of_numpy && !h->closed ? h->spare : NIL;
    const block_t *spare = h->blocks + n;
    if (n != NIL && spare->size == ((nbytes + alignment - 1) & -alignment) && !(spare->offset & (alignment - 1))) {
        h->spare = NIL;
        h->blocks[n].asked = nbytes;
        h->blocks[n].id = 0;
        h->count++;
        note_used(h, spare->offset, 0, spare->size);
    } else {
        settle(h);
        n = h->closed ? NIL : place(h, nbytes, alignment);
        while (n == NIL && h->busy_trimming && !h->closed) { /* what is being trimmed is free in a moment */
            pthread_mutex_unlock(&h->lock);
            pthread_mutex_lock(&h->trimming);
            pthread_mutex_lock(&h->lock);
            n = place(h, nbytes, alignment);
            pthread_mutex_unlock(&h->trimming);
        }
    }
    int64_t offset = -1;
    if (n != NIL) {
        block_t *b = h->blocks + n;
        offset = (int64_t)b->offset;
        b->of_numpy = of_numpy;
        if (of_numpy) h->of_numpy += b->size;
    }
    pthread_mutex_unlock(&h->lock);
    return offset;
}
/* Bytes that are committed, free, and not pinned. Called under the lock. */
static uint64_t idle(const heap_t *h) {
    uint64_t committed = __atomic_load_n(&h->committed, __ATOMIC_RELAXED), kept = h->used + h->pinned - h->pinned_used;
    return committed > kept ? committed - kept : 0;
}
/* Make the eventfd readable, once, when more than the limit is idle. Called under the lock. */
static void tell_if_idle(heap_t *h) {
    uint64_t one = 1;
    if (!h->told && h->event_fd >= 0 && idle(h) > h->idle_limit) h->told = write(h->event_fd, &one, sizeof one) == sizeof one;
}
/* Nothing is registered any more: what was pinned is committed as any memory. */
static void unpin_all(heap_t *h) {
    pthread_mutex_lock(&h->pinning);
    pthread_mutex_lock(&h->punching);
    pthread_mutex_lock(&h->lock);
    if (h->pinned) memset(h->pins, 0, (h->nbytes / GRANULE / 64 + 1) * sizeof *h->pins);
    h->pinned = h->pinned_used = 0;
    tell_if_idle(h);
    int closed = h->closed;
    pthread_mutex_unlock(&h->lock);
    pthread_mutex_unlock(&h->punching);
    pthread_mutex_unlock(&h->pinning);
    if (closed && h->base) trim(h, 0, UINT64_MAX); /* which could not be done when it was closed */
}
/* One holder less. 0, or -1: nothing is allocated there. */
static int release(heap_t *h, uint64_t offset, int of_numpy) {
    pthread_mutex_lock(&h->lock);
    uint32_t n = block_from(h, offset);
    if (n == NIL) { pthread_mutex_unlock(&h->lock); return -1; }
    block_t *b = h->blocks + n;
    int spared = of_numpy && b->of_numpy && b->holders == 1 && !h->closed;
    if (of_numpy && b->of_numpy) { b->of_numpy = 0; h->of_numpy -= b->size; }
    int punches = 0, empty = 0;
    uint64_t size = b->size;
    if (b->holders > 1) b->holders--;
    else if (h->closed && h->base && !h->foreign && size >= GRANULE) punches = 1; /* still held: punched with the lock open */
    else {
        if (spared) {
            settle(h);
            h->spare = n;
            h->count--;
            note_used(h, offset, size, 0);
        } else
            give_back(h, n);
        tell_if_idle(h);
        empty = h->closed && h->count == 0 && h->base && !h->foreign;
    }
    if (empty) close_fd(h);
    pthread_mutex_unlock(&h->lock);
    if (punches) {
        punch_block(h, offset, size, UINT64_MAX);
        pthread_mutex_lock(&h->lock);
        give_back(h, n);
        empty = h->count == 0;
        if (empty) close_fd(h);
        pthread_mutex_unlock(&h->lock);
    }
    if (empty) trim(h, 0, UINT64_MAX);
    return 0;
}
/* Another size for a block of which the caller is the only holder, in place. 0, or -1: it must move. */
static int resize(heap_t *h, uint64_t offset, uint64_t nbytes) {
    int code = -1;
    uint64_t asked = 0;
    pthread_mutex_lock(&h->lock);
    settle(h);
    uint32_t n = h->closed ? NIL : block_from(h, offset);
    if (n != NIL && h->blocks[n].holders == 1 && nbytes && nbytes <= INT64_MAX && have_records(h, 1) == 0) {
        block_t *b = h->blocks + n;
        uint64_t size = (nbytes + 63) & -(uint64_t)64, old = b->size;
        if (size > old && b->after != NIL && h->blocks[b->after].holders == 0 && h->blocks[b->after].size >= size - old) {
            remove_free(h, b->after);
            join_after(h, n);
        }
        b = h->blocks + n;
        if (size <= b->size) {
            if (size < b->size) {
                uint32_t rest = cut(h, n, size);
                coalesce(h, rest);
            }
            b = h->blocks + n;
            asked = b->asked;
            b->asked = nbytes;
            note_used(h, offset, old, b->size);
            if (b->of_numpy) h->of_numpy += b->size - old;
            code = 0;
        }
    }
    pthread_mutex_unlock(&h->lock);
    if (code == 0 && h->base && commit_surely(h, offset, nbytes)) { /* it has the room, and its old bytes still: it may move */
        pthread_mutex_lock(&h->lock);
        h->blocks[n].asked = asked;
        pthread_mutex_unlock(&h->lock);
        code = -1;
    }
    return code;
}

/* ---------------------------------------------------------------- life */

static pthread_mutex_t heaps_lock = PTHREAD_MUTEX_INITIALIZER;
static heap_t *heaps;

/* fork(2): the child gets the blocks as they are, but the memory is the parent's. Every lock is taken, so that none is left
 * held by a thread that the child does not have, but `pinning`, for which one could wait long: the child makes that one anew.
 * Then the child's mapping becomes a private one, so that writing there stays there, and nothing is allocated or given back any
 * more. What is registered with a card is the parent's memory, by the parent: the child, which cannot punch it, has nothing
 * pinned. */
static void before_fork(void) {
    pthread_mutex_lock(&heaps_lock);
    for (heap_t *h = heaps; h; h = h->next) {
        pthread_mutex_lock(&h->trimming);
        pthread_mutex_lock(&h->punching);
        pthread_mutex_lock(&h->lock);
    }
}
static void after_fork(void) {
    for (heap_t *h = heaps; h; h = h->next) {
        pthread_mutex_unlock(&h->lock);
        pthread_mutex_unlock(&h->punching);
        pthread_mutex_unlock(&h->trimming);
    }
    pthread_mutex_unlock(&heaps_lock);
}
static void after_fork_in_child(void) {
    for (heap_t *h = heaps; h; h = h->next) {
        int first = !h->foreign; /* else it is private already, and holds what this child's own parent wrote */
        h->closed = h->foreign = 1;
        h->event_fd = h->growth_fd = -1;
        h->pinned = h->pinned_used = 0;
        if (h->pins) memset(h->pins, 0, (h->nbytes / GRANULE / 64 + 1) * sizeof *h->pins);
        pthread_mutex_init(&h->pinning, NULL);
        /* Where it fails the mapping stays as it is, shared: the child must not write then, but nothing else can be done here. */
        if (first && h->base && h->fd >= 0)
            mmap(h->base, h->nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, h->fd, 0);
    }
    after_fork();
}

#define ANONYMOUS (-2)
/* A heap over `nbytes` of `fd`, mapped here; the descriptor becomes the heap's. With fd -1 an allocator of offsets alone, with
 * ANONYMOUS over memory without a file.
 * NULL with errno. */
static heap_t *heap_new(int fd, uint64_t nbytes, uint64_t extent) {
    heap_t *h = calloc(1, sizeof *h);
    if (!h) return NULL;
    h->fd = fd < 0 ? -1 : fd;
    h->anonymous = fd == ANONYMOUS;
    h->nbytes = nbytes;
    h->extent = extent;
    h->event_fd = h->growth_fd = -1;
    h->random = 0x9e3779b97f4a7c15;
    h->fallocate = posix_take;
    h->can_populate = 1;
    pthread_mutex_init(&h->lock, NULL);
    pthread_mutex_init(&h->pinning, NULL);
    pthread_mutex_init(&h->trimming, NULL);
    pthread_mutex_init(&h->punching, NULL);
    if (fd >= 0 || h->anonymous) {
        int flags = h->anonymous ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
        h->granules = calloc(nbytes / GRANULE / 64 + 1, sizeof *h->granules);
        h->pins = calloc(nbytes / GRANULE / 64 + 1, sizeof *h->pins);
        /* Aligned to huge pages, without which the kernel gives none: reserve more, map inside, give back the rest. */
        uint64_t reserved = nbytes + GRANULE;
        char *space = MAP_FAILED;
        if (h->granules && h->pins) space = mmap(NULL, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (space != MAP_FAILED) {
            char *base = (char *)(((uintptr_t)space + GRANULE - 1) & -(uintptr_t)GRANULE);
            uint64_t end = (nbytes + PAGE - 1) & -PAGE;
            if (base > space) munmap(space, (size_t)(base - space));
            munmap(base + end, (size_t)(space + reserved - (base + end)));
            if (mmap(base, nbytes, PROT_READ | PROT_WRITE, flags | MAP_FIXED | MAP_NORESERVE, h->fd, 0) == MAP_FAILED) {
                int code = errno;
                munmap(base, end);
                errno = code;
            } else
                h->base = base;
        }
        if (!h->base) {
            int code = errno;
            free(h->granules);
            free(h->pins);
            free(h);
            errno = code;
            return NULL;
        }
        h->can_populate = !h->anonymous;
        h->huge_on_advice = !h->anonymous && huge_on_advice();
        if (!h->anonymous) madvise(h->base, nbytes, MADV_HUGEPAGE); /* EINVAL: the kernel has no huge pages, and small ones will do */
    }
    pthread_mutex_lock(&heaps_lock);
    h->next = heaps;
    heaps = h;
    pthread_mutex_unlock(&heaps_lock);
    return h;
}
/* Nothing is allocated any more; memory that is free goes back now, the rest as it is freed, and what is pinned with `unpin_all`. */
static void heap_close(heap_t *h) {
    pthread_mutex_lock(&h->pinning); /* `pin` needs the descriptor, and need own no block */
    pthread_mutex_lock(&h->lock);
    h->closed = 1;
    h->event_fd = h->growth_fd = -1;
    if (h->count == 0) close_fd(h); /* else it is needed for a fork: see above */
    pthread_mutex_unlock(&h->lock);
    pthread_mutex_unlock(&h->pinning);
    if (h->base && !h->foreign) trim(h, 0, UINT64_MAX);
}
static void heap_free(heap_t *h) {
    pthread_mutex_lock(&heaps_lock);
    heap_t **at = &heaps;
    while (*at != h) at = &(*at)->next;
    *at = h->next;
    pthread_mutex_unlock(&heaps_lock);
    if (h->base) munmap(h->base, h->nbytes);
    close_fd(h);
    free(h->granules);
    free(h->pins);
    free(h->blocks);
    for (unsigned i = 0; i < h->ngroups; i++) {
        free(h->groups[i].limit);
        free(h->groups[i].usage);
        free(h->groups[i].statistics);
        free(h->groups[i].inactive);
    }
    free(h->groups);
    pthread_mutex_destroy(&h->lock);
    pthread_mutex_destroy(&h->pinning);
    pthread_mutex_destroy(&h->trimming);
    pthread_mutex_destroy(&h->punching);
    free(h);
}
#endif
