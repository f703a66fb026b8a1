/* Random operations from four threads on one heap, with its rules checked from outside.
 *
 *   stress offsets N [SEED]   a heap without memory, grown by extents that come in any order
 *   stress memory N [SEED]    over a memfd that is often full; every block carries a pattern of its own
 *   stress flaky N [SEED]     the same, and the system refuses memory now and then
 *   stress pinned N [SEED]    as `memory`, and a fifth thread pins; none of it may be punched; also flakypinned
 *   stress fork N             threads allocate while the process forks N times
 *   stress refork             a forked child forks again: its child must see the bytes that it wrote
 *   stress trim N             one thread allocates and another trims: free memory must be found all the while
 *   stress punch              the system refuses to take memory back: zeroed memory must be zero nevertheless, and
 *                             committed granules must have memory, though the system took a part
 *   stress random             getrandom(2) fails: ids come from /dev/urandom; norandom: without that, too, it aborts
 *
 * Exit status 0, or 1 and a line on stderr with the violated rule. Data that the threads share besides the heap is
 * either under a mutex of its own or, where that could lend the heap an ordering that it lacks, atomic and relaxed: the
 * thread sanitizer must see the heap's own ordering only.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
static int watched_madvise(void *address, size_t nbytes, int advice);
static ssize_t watched_getrandom(void *to, size_t nbytes, unsigned flags);
static int watched_open(const char *path, int flags);
static int watched_fallocate(int fd, off_t offset, off_t nbytes);
#define madvise watched_madvise /* the heap's */
#define getrandom watched_getrandom
#define open watched_open
#define posix_fallocate watched_fallocate
/* These are the sources, not the header alone: this program watches their system calls, and looks at their statics. */
#include "../../zcactor/objectstore/heap/blocks.c"
#include "../../zcactor/objectstore/heap/extents.c"
#include "../../zcactor/objectstore/heap/forks.c"
#include "../../zcactor/objectstore/heap/ids.c"
#include "../../zcactor/objectstore/heap/mapping.c"
#include "../../zcactor/objectstore/heap/pins.c"
#undef madvise
#undef getrandom
#undef open
#undef posix_fallocate
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define MIB ((uint64_t)1 << 20)
#define THREADS 4
#define MOST 128      /* blocks that one thread keeps */
#define SLOTS 16      /* slots of the mailbox and of the shelf */
#define EXTENT (16 * MIB)
#define EXTENTS 32    /* extents of the heap without memory */
#define ARENA (257 * MIB) /* no multiple of the bytes that are committed at once: the last granule is a short one */

#define FAIL(...) \
    do { \
        flockfile(stderr); \
        fprintf(stderr, "stress: line %d: ", __LINE__); \
        fprintf(stderr, __VA_ARGS__); \
        fputc('\n', stderr); \
        _exit(1); \
    } while (0)
#define CHECK(fact) do { if (!(fact)) FAIL("does not hold: %s", #fact); } while (0)

/* A block as its owner knows it. */
typedef struct {
    uint64_t offset, size, asked, key;
    int written;      /* how densely the pattern is written, see `fill` */
    int of_numpy;
    unsigned *shared; /* the number of holders left, once the block was on the shelf */
} piece_t;
enum { ENDS, PAGES, ALL };

static heap_t *h;
static int with_memory, flaky, pinning, stopping, forking;
static unsigned char registered[ARENA / GRANULE + 1]; /* granules that are certainly pinned; relaxed */
static uint64_t operations;
static uint64_t *claims; /* a bit per 64 bytes: whether they have an owner */
static unsigned extents_added[EXTENTS], nextents;
enum { PLACED, FULL, REFUSED, FREED, RESIZED, MUST_MOVE, MAILED, ADOPTED, TRIMMED, VERIFIED, PINNED, COUNTERS };
static uint64_t done[COUNTERS]; /* the number of tries of each kind, for the line at the end; relaxed */
static void count(int what) { __atomic_fetch_add(done + what, 1, __ATOMIC_RELAXED); }

static uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state * 0x2545f4914f6cdd1d;
}
static uint64_t below(uint64_t *state, uint64_t limit) { return (next_random(state) >> 11) % limit; }

/* ---------------------------------------------------------------- pinned memory is not punched */

static int opening, emulated; /* a heap is being made; the system ignores advice to remove pages */

static int watched_madvise(void *address, size_t nbytes, int advice) {
    if (advice == MADV_REMOVE && (opening || emulated)) return emulated ? 0 : madvise(address, nbytes, advice);
    uint64_t low = advice == MADV_REMOVE ? (uint64_t)address - (uint64_t)h->base : ARENA;
    int code = madvise(address, nbytes, advice), number = errno;
    for (uint64_t g = low / GRANULE; low < ARENA && g * GRANULE < low + nbytes; g++) /* also newly pinned ones */
        if (__atomic_load_n(registered + g, __ATOMIC_RELAXED))
            FAIL("granule %llu is pinned and was punched", (unsigned long long)g);
    errno = number;
    return code;
}
/* Bytes that are registered. */
static uint64_t check_registered(void) {
    uint64_t sum = 0;
    for (uint64_t g = 0; g * GRANULE < ARENA; g++) {
        if (!registered[g]) continue;
        CHECK(is_committed(h, g) && (uint64_t)lseek(h->fd, (off_t)(g * GRANULE), SEEK_HOLE) >= granule_end(h, g));
        sum += granule_end(h, g) - g * GRANULE;
    }
    return sum;
}
static void unregister(void) {
    for (uint64_t g = 0; g * GRANULE < ARENA; g++) __atomic_store_n(registered + g, 0, __ATOMIC_RELAXED);
    unpin_all(h);
}
/* Only one thread at a time pins. */
static int pin_noted(uint64_t offset, uint64_t nbytes) {
    int code = pin(h, offset, nbytes);
    CHECK(code == 0 || (flaky && code == ENOMEM));
    for (uint64_t g = offset / GRANULE; code == 0 && g * GRANULE < offset + nbytes; g++)
        __atomic_store_n(registered + g, 1, __ATOMIC_RELAXED);
    CHECK(check_registered() == h->pinned);
    return code;
}
/* Pins parts here and there, up to a quarter of the arena, unpins all of them, and so on. */
static void *pin_always(void *arg) {
    uint64_t random = 0x9e3779b97f4a7c15;
    while (!__atomic_load_n(&stopping, __ATOMIC_RELAXED)) {
        uint64_t offset = below(&random, ARENA), nbytes = below(&random, below(&random, 8) ? MIB : 32 * MIB) + 1;
        if (nbytes > ARENA - offset) nbytes = ARENA - offset;
        count(pin_noted(offset, nbytes) ? REFUSED : PINNED);
        if (h->pinned > ARENA / 4) unregister();
        usleep((useconds_t)below(&random, 100));
    }
    return arg;
}

/* ---------------------------------------------------------------- no bytes have two owners */

static void claim(uint64_t offset, uint64_t size, int yes) {
    if ((offset | size) % 64) FAIL("%llu bytes at %llu are not whole cache lines", (unsigned long long)size,
        (unsigned long long)offset);
    for (uint64_t at = offset / 64, stop = (offset + size) / 64; at < stop;) {
        uint64_t end = (at / 64 + 1) * 64 < stop ? (at / 64 + 1) * 64 : stop, n = end - at;
        uint64_t mask = (n == 64 ? ~0ull : (1ull << n) - 1) << at % 64, *word = claims + at / 64;
        uint64_t before = yes ? __atomic_fetch_or(word, mask, __ATOMIC_RELAXED)
                              : __atomic_fetch_and(word, ~mask, __ATOMIC_RELAXED);
        if (yes && before & mask) FAIL("bytes near %llu were handed out twice", (unsigned long long)at * 64);
        if (!yes && (before & mask) != mask) FAIL("bytes near %llu had no owner", (unsigned long long)at * 64);
        at = end;
    }
}

/* ---------------------------------------------------------------- patterns */

static uint64_t words_of(const piece_t *p) { return (p->asked + 7) / 8; }
static uint64_t *memory_of(const piece_t *p) { return (uint64_t *)(h->base + p->offset); }
static uint64_t pattern(uint64_t key, uint64_t word) { return key + word * 0x9e3779b97f4a7c15; }
static void fill(piece_t *p, int written) {
    if (!with_memory) return;
    uint64_t *at = memory_of(p), n = words_of(p), step = written == ALL ? 1 : written == PAGES ? 512 : n;
    for (uint64_t i = 0; i < n; i += step) at[i] = pattern(p->key, i);
    for (uint64_t i = 0; i < n && i < 8; i++) at[i] = pattern(p->key, i), at[n - 1 - i] = pattern(p->key, n - 1 - i);
    p->written = written;
}
/* The pattern is in the first `n` words, and in the last ones of the block if `n` is all of it. */
static void check_words(const piece_t *p, uint64_t n) {
    if (!with_memory) return;
    const uint64_t *at = memory_of(p);
    uint64_t all = words_of(p), step = p->written == ALL ? 1 : p->written == PAGES ? 512 : n;
    for (uint64_t i = 0; i < n; i += step)
        if (at[i] != pattern(p->key, i)) FAIL("word %llu of a block at %llu was overwritten", (unsigned long long)i,
            (unsigned long long)p->offset);
    for (uint64_t i = 0; i < n && i < 8; i++)
        if (at[i] != pattern(p->key, i) || (n == all && at[n - 1 - i] != pattern(p->key, n - 1 - i)))
            FAIL("an end of the block of %llu bytes at %llu was overwritten", (unsigned long long)p->asked,
                (unsigned long long)p->offset);
}
static void check_piece(const piece_t *p) { check_words(p, words_of(p)); }
static void check_zero(const piece_t *p) {
    const uint64_t *at = memory_of(p);
    /* old bytes would be in every page at least */
    uint64_t n = p->asked / 8, step = p->asked <= MIB / 4 ? 1 : 64;
    for (uint64_t i = 0; i < n; i += step)
        if (at[i]) FAIL("word %llu of zeroed memory at %llu is %llx", (unsigned long long)i,
            (unsigned long long)p->offset, (unsigned long long)at[i]);
    for (uint64_t i = p->asked < 64 ? 0 : p->asked - 64; i < p->asked; i++)
        if (((const char *)at)[i]) FAIL("byte %llu of zeroed memory at %llu is not zero", (unsigned long long)i,
            (unsigned long long)p->offset);
}

/* ---------------------------------------------------------------- the heap's own structure; called under its lock */

static uint64_t check_tree(uint32_t root, int by_size, int bin, uint64_t *bytes) {
    if (root == NIL) return 0;
    const block_t *b = h->blocks + root;
    CHECK(root < h->nblocks && b->size > 0 && (by_size ? b->holders == 0 && bin_of(b->size) == bin : b->holders > 0));
    for (int i = 0; i < 2; i++) {
        uint32_t child = i ? b->right : b->left;
        if (child == NIL) continue;
        const block_t *c = h->blocks + child;
        CHECK(c->priority <= b->priority);
        CHECK(precedes(h, child, b->size, b->offset, by_size) == !i);
    }
    *bytes += b->size;
    return 1 + check_tree(b->left, by_size, bin, bytes) + check_tree(b->right, by_size, bin, bytes);
}
static void verify(void) {
    uint64_t used = 0, free_bytes = 0, all_bytes = 0, nfree = 0, loose = 0, loose_bytes = 0, of_numpy = 0, records = 0;
    uint64_t retired = 0, retired_bytes = 0;
    uint64_t spare = h->spare != NIL; /* freed, but still in the tree of allocated blocks */
    CHECK(check_tree(h->all, 0, 0, &used) == h->count + spare);
    if (spare) {
        const block_t *b = h->blocks + h->spare;
        CHECK(b->size && b->holders == 1 && !b->of_numpy && block_from(h, b->offset) == NIL);
        CHECK(block_around(h, b->offset) == NIL);
        used -= b->size;
        loose_bytes += b->size;
    }
    uint64_t pinned = 0, pinned_used = 0;
    for (uint64_t g = 0; with_memory && g * GRANULE < ARENA; g++)
        if (is_pinned(h, g)) pinned += granule_end(h, g) - g * GRANULE, pinned_used += used_in(h, g);
    CHECK(pinned == h->pinned && pinned_used == h->pinned_used);
    CHECK(used == h->used && h->used <= h->capacity && h->peak >= h->used);
    for (int bin = 0; bin < BINS; bin++) {
        CHECK((h->bins[bin] != NIL) == (int)(h->filled[bin / 64] >> bin % 64 & 1));
        nfree += check_tree(h->bins[bin], 1, bin, &free_bytes);
    }
    uint32_t tail = NIL, found_free = 0;
    for (uint32_t n = 1; n < h->nblocks; n++) {
        const block_t *b = h->blocks + n;
        if (b->size == 0) continue;
        records++;
        all_bytes += b->size;
        if (b->of_numpy) of_numpy += b->size;
        if (b->holders == RETIRED) {
            CHECK(block_from(h, b->offset) != n && has_private(h, b->offset, b->size));
            retired++, retired_bytes += b->size;
        }
        CHECK(block_from(h, b->offset) != n || b->offset + b->size <= h->high);
        /* `trim` is at work on this block */
        if (b->holders && b->holders != RETIRED && n != h->spare && block_from(h, b->offset) != n) loose++, loose_bytes += b->size;
        if (!b->holders) found_free++;
        if (tail == NIL || b->offset > h->blocks[tail].offset) tail = n;
        if (b->after != NIL) {
            const block_t *after = h->blocks + b->after;
            CHECK(after->before == n && after->offset == b->offset + b->size);
            CHECK(b->holders || after->holders); /* free neighbours are one block */
        }
    }
    CHECK(tail == h->tail && found_free == nfree && loose <= 1 && of_numpy == h->of_numpy && retired_bytes == h->retired);
    CHECK(all_bytes == h->capacity && used + free_bytes + loose_bytes + retired_bytes == all_bytes &&
        records == h->count + spare + nfree + loose + retired);
    count(VERIFIED);
}

/* ---------------------------------------------------------------- operations */

static pthread_mutex_t mail_lock = PTHREAD_MUTEX_INITIALIZER, shelf_lock = PTHREAD_MUTEX_INITIALIZER;
static struct { piece_t piece; int from, there; } mailbox[SLOTS], shelf[SLOTS];

static uint64_t size_in_heap(uint64_t offset) {
    pthread_mutex_lock(&h->lock);
    uint32_t n = block_from(h, offset);
    uint64_t size = n == NIL ? 0 : h->blocks[n].size;
    CHECK(n == NIL || block_around(h, offset + size - 1) == n);
    pthread_mutex_unlock(&h->lock);
    return size;
}
/* Adds an extent that was not added yet. 0: all were. */
static int add_extent(uint64_t choice) {
    pthread_mutex_lock(&h->lock);
    int there = nextents < EXTENTS;
    if (there) {
        unsigned i = (unsigned)(choice % EXTENTS);
        while (extents_added[i]) i = (i + 1) % EXTENTS;
        extents_added[i] = 1;
        nextents++;
        CHECK(grow(h, i * EXTENT, EXTENT) == 0);
        CHECK(grow(h, i * EXTENT + EXTENT - 64, 64) == EINVAL);
    }
    pthread_mutex_unlock(&h->lock);
    return there;
}
static int make(piece_t *p, uint64_t *random) {
    static const uint64_t alignments[] = {64, 64, 64, 4096, 4096, 4096, 4096, 2 * MIB};
    piece_t made = {.key = next_random(random), .of_numpy = below(random, 4) != 0};
    uint64_t alignment = alignments[below(random, 8)];
    int bits = 6 + (int)below(random, 17); /* 64 bytes to 8 MiB */
    made.asked = ((uint64_t)1 << bits) + below(random, (uint64_t)1 << bits);
    if (below(random, 128) == 0) made.asked = 8 * MIB + below(random, 40 * MIB);
    made.size = (made.asked + alignment - 1) & -alignment;
    int64_t offset = allocate(h, made.asked, alignment, made.of_numpy);
    if (offset < 0 && !with_memory && add_extent(next_random(random))) return 0;
    count(offset < 0 ? FULL : PLACED);
    if (offset < 0) return 0;
    made.offset = (uint64_t)offset;
    CHECK(made.offset % alignment == 0);
    claim(made.offset, made.size, 1);
    CHECK(size_in_heap(made.offset) == made.size);
    if (with_memory) {
        int zeroed = below(random, 4) == 0;
        int code = zeroed ? commit_zeroed(h, made.offset, made.asked) : commit(h, made.offset, made.asked);
        if (code) {
            CHECK(flaky && code == ENOMEM);
            count(REFUSED);
            claim(made.offset, made.size, 0);
            CHECK(release(h, made.offset, made.of_numpy) == 0);
            return 0;
        }
        CHECK(missing(h, made.offset, made.asked) == 0);
        if (zeroed) check_zero(&made);
        uint64_t dense = below(random, made.asked <= 64 * 1024 ? 2 : 64);
        fill(&made, dense == 0 ? ALL : dense % 2 ? PAGES : ENDS);
    }
    *p = made;
    return 1;
}
static void drop(piece_t *p, int of_numpy) {
    check_piece(p);
    if (p->shared) {
        /* Only the last holder clears the claim. Acquire and release, as for every count of holders: it frees it. */
        if (__atomic_sub_fetch(p->shared, 1, __ATOMIC_ACQ_REL) == 0) {
            free(p->shared);
            claim(p->offset, p->size, 0);
        }
    } else
        claim(p->offset, p->size, 0);
    CHECK(release(h, p->offset, of_numpy) == 0);
    count(FREED);
}
static void destroy(piece_t *p) {
    if (p->shared) { /* no thread may adopt it from here on */
        pthread_mutex_lock(&shelf_lock);
        for (int i = 0; i < SLOTS; i++)
            if (shelf[i].there && shelf[i].piece.offset == p->offset) shelf[i].there = 0;
        pthread_mutex_unlock(&shelf_lock);
    }
    drop(p, p->of_numpy);
}
static void change(piece_t *p, uint64_t *random) {
    uint64_t asked = below(random, 2) ? p->asked + below(random, p->asked) + 1 : below(random, p->asked) + 1;
    uint64_t size = (asked + 63) & -(uint64_t)64, old = words_of(p);
    check_piece(p);
    if (p->shared) return; /* other threads may read it */
    if (size < p->size) claim(p->offset + size, p->size - size, 0);
    int code = resize(h, p->offset, asked);
    uint64_t now = size_in_heap(p->offset);
    count(code ? MUST_MOVE : RESIZED);
    if (code) {
        CHECK(size > p->size || flaky || forking); /* a block that a child sees is not cut */
        if (size < p->size && forking) claim(p->offset + size, p->size - size, 1);
        CHECK(now == p->size || (flaky && now == size)); /* there was room, but no memory */
        if (now > p->size) claim(p->offset + p->size, now - p->size, 1);
        p->size = now;
        if (p->asked > now) p->asked = now;
        check_words(p, old < words_of(p) ? old : words_of(p));
        return;
    }
    CHECK(now == size);
    if (now > p->size) claim(p->offset + p->size, now - p->size, 1);
    p->size = now;
    p->asked = asked;
    if (with_memory) CHECK(missing(h, p->offset, asked) == 0);
    check_words(p, old < words_of(p) ? old : words_of(p) - 1); /* the last word may be of the old end, or unwritten */
    fill(p, p->written);
}
/* Adds a holder, as `heap_adopt` in heap.c does. */
static void adopt(const piece_t *p) {
    pthread_mutex_lock(&h->lock);
    uint32_t n = block_from(h, p->offset);
    CHECK(n != NIL && h->blocks[n].asked == p->asked && h->blocks[n].of_numpy == p->of_numpy);
    uint64_t id = id_of(h, n);
    CHECK(id != 0 && id_of(h, n) == id);
    h->blocks[n].holders++;
    pthread_mutex_unlock(&h->lock);
    count(ADOPTED);
}
static void trim_some(uint64_t *random) {
    uint64_t keep = below(random, 2) ? 0 : below(random, ARENA);
    uint64_t at_most = below(random, 2) ? UINT64_MAX : below(random, 64 * MIB);
    trim(h, keep, at_most);
    count(TRIMMED);
    pthread_mutex_lock(&h->lock);
    uint64_t rang;
    if (h->told) CHECK(read(h->event_fd, &rang, sizeof rang) == sizeof rang);
    h->told = 0;
    h->peak = h->used;
    pthread_mutex_unlock(&h->lock);
}

typedef struct { int number; uint64_t seed; piece_t pieces[MOST]; pthread_t thread; } worker_t;

static void *work(void *arg) {
    worker_t *w = arg;
    uint64_t random = w->seed * 0x9e3779b97f4a7c15 + (uint64_t)w->number * 0xbf58476d1ce4e5b9 + 1;
    piece_t adopted[SLOTS];
    int n = 0, nadopted = 0;
    for (int i = 0; i < 8; i++) next_random(&random);
    for (uint64_t i = 0; i < operations / THREADS && !__atomic_load_n(&stopping, __ATOMIC_RELAXED); i++) {
        if (w->number == 0 && with_memory && below(&random, pinning ? 16 : 512) == 0) trim_some(&random);
        if (w->number == 3 && below(&random, 512) == 0) {
            pthread_mutex_lock(&h->lock);
            verify();
            pthread_mutex_unlock(&h->lock);
        }
        uint64_t what = below(&random, 100);
        piece_t *some = n ? w->pieces + below(&random, (uint64_t)n) : NULL;
        if (what < 45 || !some) {
            if (n == MOST || !make(w->pieces + n, &random)) { /* full: make room for the other threads */
                for (int k = 0; k < 4 && n; k++) destroy(w->pieces + --n);
            } else
                n++;
        } else if (what < 70) {
            destroy(some);
            *some = w->pieces[--n];
        } else if (what < 85)
            change(some, &random);
        else if (what < 92) { /* by mail: another thread frees it */
            int gone = 0, got = 0;
            piece_t mail;
            pthread_mutex_lock(&mail_lock);
            for (int k = 0; k < SLOTS; k++)
                if (!mailbox[k].there && !gone && !some->shared) {
                    mailbox[k].piece = *some;
                    mailbox[k].from = w->number;
                    mailbox[k].there = gone = 1;
                } else if (mailbox[k].there && mailbox[k].from != w->number && !got) {
                    mail = mailbox[k].piece;
                    mailbox[k].there = 0;
                    got = 1;
                }
            pthread_mutex_unlock(&mail_lock);
            if (gone) { *some = w->pieces[--n]; count(MAILED); }
            if (got) destroy(&mail);
        } else if (what < 95) { /* two holders: the block cannot change its size, and lives until both are gone */
            if (some->shared) continue;
            adopt(some);
            CHECK(resize(h, some->offset, some->asked) == -1);
            CHECK(release(h, some->offset, 0) == 0);
            CHECK(size_in_heap(some->offset) == some->size);
            check_piece(some);
        } else if (what < 97) { /* on the shelf: thread 1 holds it as well */
            pthread_mutex_lock(&shelf_lock);
            for (int k = 0; k < SLOTS && !some->shared; k++) {
                if (shelf[k].there) continue;
                some->shared = malloc(sizeof *some->shared);
                CHECK(some->shared);
                *some->shared = 1;
                shelf[k].piece = *some;
                shelf[k].there = 1;
            }
            pthread_mutex_unlock(&shelf_lock);
        } else if (w->number == 1) {
            if (nadopted == SLOTS) drop(adopted + --nadopted, 0);
            int k = (int)below(&random, SLOTS);
            pthread_mutex_lock(&shelf_lock);
            if (shelf[k].there) {
                adopted[nadopted] = shelf[k].piece;
                __atomic_fetch_add(adopted[nadopted].shared, 1, __ATOMIC_RELAXED);
                adopt(adopted + nadopted++);
                shelf[k].there = 0;
            }
            pthread_mutex_unlock(&shelf_lock);
        } else
            check_piece(some);
    }
    while (n) destroy(w->pieces + --n);
    while (nadopted) drop(adopted + --nadopted, 0);
    return NULL;
}

/* ---------------------------------------------------------------- modes */

static uint64_t bytes_of_file(void) {
    struct stat stat;
    CHECK(fstat(h->fd, &stat) == 0);
    return (uint64_t)stat.st_blocks * 512;
}
/* The system refuses memory now and then. */
static int refuse(heap_t *heap, uint64_t offset, uint64_t nbytes) {
    static uint64_t calls;
    return __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED) % 7 == 0 ? ENOMEM : posix_take(heap, offset, nbytes);
}
static void open_heap(void) {
    uint64_t nbytes = with_memory ? ARENA : EXTENT * EXTENTS;
    int fd = -1;
    if (with_memory) {
        fd = memfd_create("stress", MFD_CLOEXEC);
        if (fd < 0 || ftruncate(fd, (off_t)nbytes)) FAIL("no memfd: %s", strerror(errno));
    }
    opening = 1;
    h = heap_new(fd, with_memory ? nbytes : 0, EXTENT);
    opening = 0;
    claims = calloc(nbytes / 4096 + 1, sizeof *claims);
    CHECK(h && claims);
    if (flaky) {
        h->fallocate = refuse;
        h->huge_on_advice = 0; /* otherwise the kernel is asked in another way */
    }
}
static void start(worker_t *workers, uint64_t seed) {
    for (int i = 0; i < THREADS; i++) {
        workers[i].number = i;
        workers[i].seed = seed;
        CHECK(pthread_create(&workers[i].thread, NULL, work, workers + i) == 0);
    }
}
/* Pinned memory stays after all blocks were freed and all memory was trimmed. */
static void finish_pinning(pthread_t thread) {
    __atomic_store_n(&stopping, 1, __ATOMIC_RELAXED);
    CHECK(pthread_join(thread, NULL) == 0);
    if (h->pinned == 0) pin_noted(3 * MIB, 20 * MIB);
    trim(h, 0, UINT64_MAX);
    verify();
    CHECK(h->used == 0 && h->pinned_used == 0 && h->committed == h->pinned && idle(h) == 0 && trim(h, 0, 1) == 0);
    uint64_t pinned = check_registered();
    unregister();
    CHECK(h->pinned == 0 && idle(h) == pinned && h->committed == pinned);
}
/* Waits for the threads; then all memory is free, and none must be left. */
static void finish(worker_t *workers, const pthread_t *pinner) {
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(workers[i].thread, NULL) == 0);
    for (int k = 0; k < SLOTS; k++) {
        if (mailbox[k].there) drop(&mailbox[k].piece, mailbox[k].piece.of_numpy);
        CHECK(!shelf[k].there);
    }
    while (!with_memory && add_extent(0)) continue;
    if (pinner) finish_pinning(*pinner); /* it still changes the heap until then */
    verify();
    settle(h);
    reclaim(h); /* all children have ended */
    verify();
    CHECK(h->retired == 0 && h->nprivate == 0);
    CHECK(h->used == 0 && h->count == 0 && h->of_numpy == 0 && h->all == NIL);
    CHECK(h->capacity > 0 && h->blocks[largest_block(h)].size == h->capacity && tail_free(h) == h->capacity);
    uint64_t nbytes = with_memory ? ARENA : EXTENT * EXTENTS;
    for (uint64_t i = 0; i < nbytes / 4096; i++) CHECK(claims[i] == 0);
    if (with_memory) {
        uint64_t committed = 0;
        for (uint64_t g = 0; g * GRANULE < ARENA; g++)
            if (is_committed(h, g)) committed += granule_end(h, g) - g * GRANULE;
        CHECK(committed == h->committed && committed <= bytes_of_file());
        if (!flaky && !h->huge_on_advice) CHECK(committed == bytes_of_file()); /* huge pages may reach beyond the end */
        if (flaky) { /* the edges of a refused range count again once they are committed */
            h->fallocate = posix_take;
            int64_t all = allocate(h, ARENA, 64, 0);
            CHECK(all == 0 && commit(h, 0, ARENA) == 0 && h->committed == ARENA && release(h, 0, 0) == 0);
            committed = ARENA;
        }
        CHECK(trim(h, 0, UINT64_MAX) == committed);
        CHECK(h->committed == 0);
        if (bytes_of_file()) FAIL("%llu bytes of the file are left", (unsigned long long)bytes_of_file());
        verify();
    }
    heap_close(h);
    CHECK(h->closed && allocate(h, 64, 64, 0) == -1 && (!with_memory || h->fd == -1));
    heap_free(h);
    free(claims);
    static const char *names[] = {"placed", "full", "refused", "freed", "resized", "must move", "mailed", "adopted",
        "trimmed", "verified", "pinned"};
    for (int i = 0; i < COUNTERS; i++) printf("%s%s %llu", i ? ", " : "", names[i], (unsigned long long)done[i]);
    putchar('\n');
}
static void operate(uint64_t seed) {
    static worker_t workers[THREADS];
    open_heap();
    if (with_memory) {
        h->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        h->idle_limit = 32 * MIB;
        CHECK(h->event_fd >= 0);
    }
    int bell = h->event_fd;
    pthread_t pinner;
    if (pinning) CHECK(pthread_create(&pinner, NULL, pin_always, NULL) == 0);
    start(workers, seed);
    finish(workers, pinning ? &pinner : NULL);
    if (bell >= 0) close(bell);
    for (int i = PLACED; i < COUNTERS; i++) /* a run that never met a case says nothing about it */
        if (operations >= 20000 && !done[i] && (i != REFUSED || flaky) && (i != TRIMMED || with_memory) &&
            (i != PINNED || pinning))
            FAIL("counter %d stayed 0", i);
}
/* The exit status, or 128 and the signal. */
static int status_of(pid_t pid) {
    int status;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
/* A child of a program whose other threads may be anywhere in the heap: the lock is free, the structure is whole, no
 * allocation succeeds there, and the child keeps its writes and frees to itself. */
static void child(piece_t *pieces, int n) {
    pthread_mutex_lock(&h->lock);
    verify();
    uint64_t blocks = h->count;
    pthread_mutex_unlock(&h->lock);
    CHECK(h->closed && h->foreign && allocate(h, 64, 64, 0) == -1 && trim(h, 0, UINT64_MAX) == 0);
    for (int i = 0; i < n; i++) {
        check_piece(pieces + i);
        pieces[i].key = ~pieces[i].key;
        fill(pieces + i, ALL);
    }
    for (int i = 0; i < n; i++) {
        check_piece(pieces + i);
        CHECK(resize(h, pieces[i].offset, 64) == -1);
        CHECK(release(h, pieces[i].offset, pieces[i].of_numpy) == 0);
    }
    pthread_mutex_lock(&h->lock);
    verify();
    CHECK(h->count == blocks - (uint64_t)n);
    pthread_mutex_unlock(&h->lock);
    int fd = memfd_create("child", MFD_CLOEXEC); /* a heap of the child's own works as any other */
    CHECK(fd >= 0 && ftruncate(fd, 32 * MIB) == 0);
    heap_t *own = heap_new(fd, 32 * MIB, EXTENT);
    CHECK(own && allocate(own, MIB, 4096, 0) == 0 && commit(own, 0, MIB) == 0);
    memset(own->base, 7, MIB);
    CHECK(release(own, 0, 0) == 0 && trim(own, 0, UINT64_MAX) == 2 * MIB);
    heap_free(own);
    _exit(0);
}
static void fork_often(uint64_t forks) {
    static worker_t workers[THREADS];
    uint64_t random = 11;
    open_heap();
    piece_t pieces[4];
    int n = 0;
    forking = 1;
    while (n < 4) n += make(pieces + n, &random);
    operations = UINT64_MAX;
    start(workers, 5);
    for (uint64_t i = 0; i < forks; i++) {
        pid_t pid = fork();
        if (pid == 0) child(pieces, n);
        if (status_of(pid)) FAIL("the child of fork %llu failed", (unsigned long long)i);
        for (int k = 0; k < n; k++) check_piece(pieces + k); /* the parent does not see the child's writes and frees */
        piece_t other;
        if (make(&other, &random)) {
            drop(pieces + i % 4, pieces[i % 4].of_numpy);
            pieces[i % 4] = other;
        }
    }
    __atomic_store_n(&stopping, 1, __ATOMIC_RELAXED);
    for (; n; n--) drop(pieces + n - 1, pieces[n - 1].of_numpy);
    finish(workers, NULL);
}
static void fork_twice(void) {
    open_heap();
    uint64_t random = 3;
    piece_t p;
    while (!make(&p, &random)) continue;
    fill(&p, ALL);
    pid_t pid = fork();
    if (pid == 0) {
        p.key = ~p.key;
        fill(&p, ALL);
        pid_t second = fork();
        if (second == 0) {
            check_piece(&p); /* the copy is the child's, as all memory that it passes on */
            p.key ^= 0xff;
            fill(&p, ALL);
            _exit(0);
        }
        int status = status_of(second);
        check_piece(&p);
        _exit(status);
    }
    if (status_of(pid)) FAIL("the child's child failed");
    check_piece(&p);
    drop(&p, p.of_numpy);
    heap_close(h);
    heap_free(h);
    free(claims);
}
/* MADV_REMOVE is EINVAL on locked memory, as every program with mlockall(2) has it. */
static int no_random, no_files, no_memory; /* the calls that the system refuses */
static ssize_t watched_getrandom(void *to, size_t nbytes, unsigned flags) {
    if (!no_random) return getrandom(to, nbytes, flags);
    errno = no_random++ % 2 ? EINTR : ENOSYS;
    return -1;
}
static int watched_open(const char *path, int flags) {
    if (!no_files) return open(path, flags);
    errno = EMFILE;
    return -1;
}
static int watched_fallocate(int fd, off_t offset, off_t nbytes) {
    return no_memory ? ENOSPC : posix_fallocate(fd, offset, nbytes);
}
static void all_zero(void) {
    CHECK(allocate(h, 8 * MIB, 4096, 0) == 0 && commit_zeroed(h, 0, 8 * MIB) == 0);
    for (uint64_t i = 0; i < 8 * MIB; i++)
        if (h->base[i]) FAIL("byte %llu of zeroed memory is %d, after a trim that the system refused",
            (unsigned long long)i, h->base[i]);
    CHECK(h->committed == 8 * MIB && bytes_of_file() == 8 * MIB);
    memset(h->base, 7, 8 * MIB);
    CHECK(release(h, 0, 0) == 0);
}
/* As under qemu-user: memory that was trimmed is zero and goes back all the same. */
static void advice_without_effect(void) {
    emulated = 1;
    open_heap();
    CHECK(h->advice_ignored && bytes_of_file() == 0);
    for (int i = 0; i < 2; i++) {
        all_zero();
        CHECK(trim(h, 0, UINT64_MAX) == 8 * MIB && h->committed == 0 && bytes_of_file() == 0);
    }
    heap_close(h);
    heap_free(h);
    free(claims);
    emulated = 0;
    open_heap();
    CHECK(!h->advice_ignored && bytes_of_file() == 0);
    heap_close(h);
    heap_free(h);
    free(claims);
}
/* The system keeps a page: the granule around it stays whole, whichever part the system took before it refused. */
static void refuse_to_punch(void) {
    open_heap();
    all_zero();
    for (uint64_t page = 0; page < 4 * MIB; page += MIB) {
        char *locked = h->base + 2 * MIB + page / MIB % 2 * MIB + page / (2 * MIB) * 4096;
        if (mlock(locked, 4096)) { printf("cannot lock memory: %s\n", strerror(errno)); exit(77); }
        CHECK(trim(h, 0, UINT64_MAX) == 6 * MIB && h->committed == 2 * MIB && bytes_of_file() == 2 * MIB);
        all_zero();
        no_memory = 1; /* taken memory cannot be had back: then the granule does not count, and its bytes are zero */
        CHECK(trim(h, 0, UINT64_MAX) == 8 * MIB && h->committed == 0 && bytes_of_file() == 4096);
        no_memory = 0;
        all_zero();
        CHECK(munlock(locked, 4096) == 0);
    }
    CHECK(trim(h, 0, UINT64_MAX) == 8 * MIB && h->committed == 0 && bytes_of_file() == 0);
    heap_close(h);
    heap_free(h);
    free(claims);
}
/* Makes ids of many blocks, which are all different though getrandom fails. */
static void without_random(int files_too) {
    uint64_t ids[200];
    open_heap();
    no_random = 1;
    no_files = files_too;
    for (int i = 0; i < 200; i++) {
        int64_t offset = allocate(h, 64, 64, 0);
        CHECK(offset >= 0);
        pthread_mutex_lock(&h->lock);
        ids[i] = id_of(h, block_from(h, (uint64_t)offset));
        pthread_mutex_unlock(&h->lock);
        for (int j = 0; j < i; j++) CHECK((uint32_t)ids[i] != (uint32_t)ids[j] || ids[i] >> 32 != ids[j] >> 32);
    }
    int zero = 0;
    for (int i = 0; i < 200; i++) zero += (uint32_t)ids[i] == 0;
    CHECK(no_random > 1 && zero < 3);
    no_random = no_files = 0;
    heap_close(h);
    heap_free(h);
    free(claims);
}
static void *trim_always(void *arg) {
    while (!__atomic_load_n(&stopping, __ATOMIC_RELAXED)) trim(h, 0, UINT64_MAX);
    return arg;
}
static void allocate_while_trimmed(void) {
    pthread_t thread;
    open_heap();
    CHECK(pthread_create(&thread, NULL, trim_always, NULL) == 0);
    for (uint64_t i = 0; i < operations; i++) {
        int64_t offset = allocate(h, ARENA / 2 / 4096 * 4096, 4096, 0);
        if (offset < 0) FAIL("no half of an empty heap could be had in operation %llu, for it was being trimmed",
            (unsigned long long)i);
        CHECK(commit(h, (uint64_t)offset, 32 * MIB) == 0 && release(h, (uint64_t)offset, 0) == 0);
        usleep((useconds_t)(i % 256)); /* the other thread needs the lock, too */
    }
    __atomic_store_n(&stopping, 1, __ATOMIC_RELAXED);
    CHECK(pthread_join(thread, NULL) == 0 && h->used == 0);
    heap_close(h);
    heap_free(h);
    free(claims);
}
int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "";
    operations = argc > 2 ? strtoull(argv[2], NULL, 10) : 0;
    with_memory = strcmp(mode, "offsets") != 0;
    flaky = strncmp(mode, "flaky", 5) == 0;
    pinning = strstr(mode, "pinned") != NULL;
    CHECK(watch_forks() == 0);
    uint64_t seed = argc > 3 ? strtoull(argv[3], NULL, 10) : 1;
    if (!strcmp(mode, "offsets") || !strcmp(mode, "memory") || flaky || pinning) operate(seed);
    else if (!strcmp(mode, "fork")) fork_often(operations);
    else if (!strcmp(mode, "refork")) fork_twice();
    else if (!strcmp(mode, "trim")) allocate_while_trimmed();
    else if (!strcmp(mode, "punch")) refuse_to_punch();
    else if (!strcmp(mode, "ignored")) advice_without_effect();
    else if (!strcmp(mode, "random") || !strcmp(mode, "norandom")) without_random(mode[0] == 'n');
    else {
        fprintf(stderr, "usage: %s offsets|memory|flaky|pinned|flakypinned|fork|trim N [SEED], %s refork|punch|random|norandom\n",
            argv[0], argv[0]);
        return 2;
    }
    return 0;
}
