/* fork(2): a child sees the bytes of the moment of the fork, and so does the parent's file, which peers map.
 *
 * Before a fork the granules with held blocks become private mappings of the parent, so that the child inherits them:
 * from then on parent and child write to copies of single pages, as they do in ordinary memory, and nobody writes to
 * the pages of the file. Free granules stay shared, and the parent allocates there. A block in a private granule cannot
 * be read by peers any more, unless it was sealed before the fork; the store copies it when it is passed. When it is
 * released it is retired: the child may still read it. Once no child is left that sees a granule without held blocks,
 * the granule is mapped as shared again and its bytes are free.
 *
 * A child has the write end of a pipe, and so have its own children; the end of file tells that all of them have ended.
 * exec(2) closes it.
 *
 * The child itself allocates nothing in the heap and gives nothing back. Registrations with a card belong to the parent
 * and its memory: the child, which cannot punch that memory, has nothing pinned.
 */
#include "heap.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4 /* since Linux 5.7 */
#endif

typedef struct { uint32_t number; int fd; } child_t; /* a living child's fork, and the read end of its pipe */

static pthread_mutex_t heaps_lock = PTHREAD_MUTEX_INITIALIZER;
static heap_t *heaps;
static pthread_mutex_t children_lock = PTHREAD_MUTEX_INITIALIZER; /* taken last */
static child_t *children;
static uint32_t nchildren, children_room, nforks;
static _Thread_local uint32_t own_fork; /* the number of this thread's last fork: another thread may have forked since */
typedef struct { char *at; uint64_t nbytes; } range_t;
#define PART ((uint64_t)8 << 20)
static range_t aside[64]; /* mappings with page tables that are to be cleared; see `set_aside` */
static uint32_t naside;
static int pipe_of_fork[2] = {-1, -1};
static int is_seen; /* whether this process has memory that the child of the fork under way may see */

/* Forget the children that have ended. Called under `children_lock`. */
static void look_after_children(void) {
    for (uint32_t i = 0; i < nchildren;) {
        struct pollfd end = {.fd = children[i].fd, .events = POLLIN};
        if (poll(&end, 1, 0) == 1 && end.revents & (POLLHUP | POLLERR | POLLNVAL)) {
            close(children[i].fd);
            children[i] = children[--nchildren];
        } else
            i++;
    }
}
/* Whether a child lives that was made by one of the forks from `first` to `last`. Called under `children_lock`. */
static int is_alive(uint32_t first, uint32_t last) {
    if (last == UINT32_MAX) return 1;
    for (uint32_t i = 0; i < nchildren; i++)
        if (children[i].number == 0 || (children[i].number >= first && children[i].number <= last)) return 1;
    return 0;
}
/* Whether the range touches a private granule. */
int has_private(const heap_t *h, uint64_t offset, uint64_t size) {
    if (h->nprivate == 0) return 0;
    for (uint64_t g = offset / GRANULE; g * GRANULE < offset + size; g++)
        if (h->first_seen[g]) return 1;
    return 0;
}
/* Keep block `n`, which is in no tree, from being allocated: one block with the retired blocks beside it. */
static void keep_apart(heap_t *h, uint32_t n) {
    uint32_t before = h->blocks[n].before, after = h->blocks[n].after;
    h->retired += h->blocks[n].size;
    h->blocks[n].holders = RETIRED;
    if (after != NIL && h->blocks[after].holders == RETIRED) join_after(h, n);
    if (before != NIL && h->blocks[before].holders == RETIRED) join_after(h, before);
}
/* Retire the parts of block `n`, which is in no tree, that lie in private granules, and free the others. */
void retire(heap_t *h, uint32_t n) {
    for (uint32_t rest = n; rest != NIL; n = rest) {
        uint64_t low = h->blocks[n].offset, high = low + h->blocks[n].size, g = low / GRANULE, to;
        int seen = h->first_seen[g] != 0;
        do to = granule_end(h, g++);
        while (to < high && (h->first_seen[g] != 0) == seen);
        rest = NIL;
        if (to < high) {
            if (have_records(h, 1) < 0) seen = 1; /* no memory for a record: the block stays as a whole */
            else {
                rest = cut(h, n, to - low);
                h->blocks[rest].holders = 1; /* not free yet */
            }
        }
        if (seen) keep_apart(h, n);
        else coalesce(h, n);
    }
}
/* Move the page table of a range away. To clear it takes 0.15 s for 1 GiB of small pages, which a thread does after
 * the fork; to move it takes microseconds (mremap(2), MREMAP_DONTUNMAP, since Linux 5.13 for shared memory). A write
 * that comes meanwhile goes to the same file. */
static void set_aside(const heap_t *h, uint64_t low, uint64_t high) {
    if (high - low < GRANULE || naside == sizeof aside / sizeof *aside) return;
    char *space = mmap(NULL, high - low + GRANULE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED) return;
    /* As far from a huge page's beginning as the range is: whole tables are moved then. */
    char *to = space + (((uintptr_t)(h->base + low) - (uintptr_t)space) & (GRANULE - 1));
    int flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
    mremap(h->base + low, high - low, high - low, flags, to); /* if it fails, the page table is cleared at once */
    range_t range = {space, high - low + GRANULE};
    aside[naside++] = range;
}
static void clear(const range_t *ranges, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) /* by parts: a fork and other mappings wait meanwhile */
        for (uint64_t at = 0; at < ranges[i].nbytes; at += PART) {
            uint64_t left = ranges[i].nbytes - at;
            munmap(ranges[i].at + at, left < PART ? left : PART);
        }
}
static void *clear_later(void *arg) {
    clear(arg, sizeof aside / sizeof *aside);
    free(arg);
    return NULL;
}
/* Clear the tables in a thread; without one, here. */
static void clear_aside(void) {
    pthread_t thread;
    range_t *ranges = naside ? calloc(1, sizeof aside) : NULL;
    if (ranges) memcpy(ranges, aside, naside * sizeof *aside);
    if (ranges && pthread_create(&thread, NULL, clear_later, ranges) == 0) pthread_detach(thread);
    else {
        free(ranges);
        clear(aside, naside);
    }
    naside = 0;
}
/* Map whole pages again. Returns 0 or an errno. */
static int map_again(heap_t *h, uint64_t low, uint64_t high, int kind) {
    if (kind == MAP_PRIVATE) set_aside(h, low, high);
    int flags = kind | MAP_FIXED | MAP_NORESERVE;
    if (mmap(h->base + low, high - low, PROT_READ | PROT_WRITE, flags, h->fd, (off_t)low) == MAP_FAILED) return errno;
    if (kind == MAP_SHARED) madvise(h->base + low, high - low, MADV_HUGEPAGE); /* EINVAL: small pages will do */
    return 0;
}
/* Free the retired granules that no child sees any more. Returns the bytes that became free. */
uint64_t reclaim(heap_t *h) {
    uint64_t given = 0;
    if (!h->nprivate || !h->retired || h->fd < 0 || h->foreign) return 0;
    pthread_mutex_lock(&children_lock);
    look_after_children();
    for (uint32_t n = 1; n < h->nblocks; n++) {
        if (h->blocks[n].size == 0 || h->blocks[n].holders != RETIRED) continue;
        uint64_t low = h->blocks[n].offset, high = low + h->blocks[n].size, first = (low + GRANULE - 1) / GRANULE;
        uint64_t end = high == h->nbytes ? (high + GRANULE - 1) / GRANULE : high / GRANULE;
        while (first < end && is_alive(h->first_seen[first], h->last_seen[first])) first++;
        uint64_t stop = first;
        while (stop < end && !is_alive(h->first_seen[stop], h->last_seen[stop])) stop++;
        if (first >= stop || have_records(h, 2) < 0 || map_again(h, first * GRANULE, granule_end(h, stop - 1), MAP_SHARED)) continue;
        for (uint64_t g = first; g < stop; g++) {
            h->nprivate -= h->first_seen[g] != 0;
            h->first_seen[g] = h->last_seen[g] = 0;
        }
        uint64_t to = granule_end(h, stop - 1);
        uint32_t made = n;
        if (first * GRANULE > low) made = cut(h, n, first * GRANULE - low);
        if (made != n) h->blocks[made].holders = RETIRED;
        if (to < high) h->blocks[cut(h, made, to - first * GRANULE)].holders = RETIRED; /* looked at later in the loop */
        h->retired -= to - first * GRANULE;
        given += to - first * GRANULE;
        coalesce(h, made);
    }
    pthread_mutex_unlock(&children_lock);
    return given;
}
/* Whether a held block stays shared: only peers and this package write to it, and it shares no page with others. */
static int stays_shared(const block_t *b) { return !b->of_numpy && !b->shown && !((b->offset | b->size) & (PAGE - 1)); }
/* Map [low, high) privately, except blocks that stay shared. Returns 0 or an errno. */
static int map_others(heap_t *h, uint64_t low, uint64_t high) {
    uint32_t n = block_around(h, low);
    uint64_t from = n == NIL ? low : h->blocks[n].offset;
    for (int code; (n = block_next(h, from)) != NIL && h->blocks[n].offset < high;) {
        const block_t *b = h->blocks + n;
        from = b->offset + b->size;
        if (!stays_shared(b)) continue;
        if (b->offset > low && (code = map_again(h, low, b->offset, MAP_PRIVATE))) return code;
        low = from;
    }
    return low < high ? map_again(h, low, high, MAP_PRIVATE) : 0;
}
/* Map the granules that fork `number` is to make private, and that are not yet. */
static void map_privately(heap_t *h, uint32_t number) {
    uint64_t ngranules = (h->capacity + GRANULE - 1) / GRANULE;
    for (uint64_t g = 0; g < ngranules; g++) {
        if (h->first_seen[g] || h->last_seen[g] != number) continue;
        uint64_t stop = g + 1;
        while (stop < ngranules && !h->first_seen[stop] && h->last_seen[stop] == number) stop++;
        /* If it fails, the granules stay shared. The child tries again. */
        if (map_others(h, g * GRANULE, granule_end(h, stop - 1)) == 0) {
            for (uint64_t made = g; made < stop; made++) h->first_seen[made] = number;
            h->nprivate += stop - g;
        }
        g = stop - 1;
    }
}
/* Retire the free bytes of private granules. */
static void retire_free(heap_t *h) {
    for (uint32_t n = 1; n < h->nblocks; n++) {
        const block_t *b = h->blocks + n;
        if (b->size == 0 || b->holders || !has_private(h, b->offset, b->size)) continue;
        remove_free(h, n);
        h->blocks[n].holders = 1; /* not free meanwhile */
        retire(h, n);
    }
}
/* Make the granules with held blocks private. */
static void protect(heap_t *h, uint32_t number) {
    uint64_t ngranules = (h->nbytes + GRANULE - 1) / GRANULE;
    if (h->foreign || !h->base || h->fd < 0) return;
    if (h->nprivate) reclaim(h);
    settle(h);
    if (h->count == 0 && !h->nprivate) return;
    if (!h->first_seen) h->first_seen = calloc(ngranules, sizeof *h->first_seen);
    if (!h->last_seen) h->last_seen = calloc(ngranules, sizeof *h->last_seen);
    if (!h->first_seen || !h->last_seen) return;
    /* A granule that reaches beyond the capacity is private as a whole: its end must not be free later. */
    uint64_t end = h->capacity ? granule_end(h, (h->capacity - 1) / GRANULE) : 0;
    if (end > h->capacity && grow(h, h->capacity, end - h->capacity)) return;
    for (uint32_t n = 1; n < h->nblocks; n++) {
        block_t *b = h->blocks + n;
        if (b->size == 0 || b->holders == 0 || b->holders == RETIRED || stays_shared(b)) continue;
        for (uint64_t g = b->offset / GRANULE; g * GRANULE < b->offset + b->size; g++) {
            /* A block that stayed shared at the fork that made the granule private: it has pages of its own. */
            if (h->first_seen[g] && !b->seen) {
                uint64_t low = g * GRANULE > b->offset ? g * GRANULE : b->offset, high = granule_end(h, g);
                map_again(h, low, high < b->offset + b->size ? high : b->offset + b->size, MAP_PRIVATE);
            }
            if (h->last_seen[g] != UINT32_MAX) h->last_seen[g] = number;
        }
        b->seen = 1;
    }
    map_privately(h, number);
    if (h->nprivate) retire_free(h);
}

/* Every lock is taken, so that no lock stays held by a thread that the child lacks. Only `pinning` is not taken, because
 * the wait for it may be long: the child initialises it anew. */
static void before_fork(void) {
    pthread_mutex_lock(&heaps_lock);
    for (heap_t *h = heaps; h; h = h->next) {
        pthread_mutex_lock(&h->trimming);
        pthread_mutex_lock(&h->punching);
        pthread_mutex_lock(&h->lock);
    }
    is_seen = 0;
    for (heap_t *h = heaps; h; h = h->next) is_seen |= !h->foreign && h->base && h->fd >= 0;
    if (++nforks == UINT32_MAX) nforks = 1;
    own_fork = nforks;
    for (heap_t *h = heaps; h; h = h->next) protect(h, nforks);
    pthread_mutex_lock(&children_lock);
    if (is_seen && pipe2(pipe_of_fork, O_CLOEXEC)) pipe_of_fork[0] = pipe_of_fork[1] = -1;
}
static void unlock(void) {
    pthread_mutex_unlock(&children_lock);
    for (heap_t *h = heaps; h; h = h->next) {
        pthread_mutex_unlock(&h->lock);
        pthread_mutex_unlock(&h->punching);
        pthread_mutex_unlock(&h->trimming);
    }
    pthread_mutex_unlock(&heaps_lock);
}
static void after_fork(void) {
    clear_aside();
    if (is_seen) {
        if (pipe_of_fork[1] >= 0) close(pipe_of_fork[1]);
        if (nchildren == children_room) {
            uint32_t room = children_room ? children_room * 2 : 8;
            child_t *more = realloc(children, room * sizeof *more);
            if (more) { children = more; children_room = room; }
        }
        /* Without a pipe, or without memory for the entry, the child lives for ever: number 0 and no descriptor, which
         * poll(2) ignores. */
        child_t child = {.number = nforks, .fd = pipe_of_fork[0]};
        if (nchildren < children_room) children[nchildren++] = child;
        else children[nchildren - 1].number = 0;
        pipe_of_fork[0] = pipe_of_fork[1] = -1;
    }
    unlock();
}
static void after_fork_in_child(void) {
    clear(aside, naside); /* the kernel copies no page table of shared memory */
    naside = 0;
    for (uint32_t i = 0; i < nchildren; i++)
        if (children[i].fd >= 0) close(children[i].fd);
    nchildren = 0;
    if (pipe_of_fork[0] >= 0) close(pipe_of_fork[0]);
    pipe_of_fork[0] = pipe_of_fork[1] = -1; /* the write end stays open until the child ends */
    for (heap_t *h = heaps; h; h = h->next) {
        int first = !h->foreign;
        h->closed = h->foreign = 1;
        h->event_fd = h->growth_fd = -1;
        h->pinned = h->pinned_used = 0;
        if (h->pins) memset(h->pins, 0, (h->nbytes / GRANULE / 64 + 1) * sizeof *h->pins);
        pthread_mutex_init(&h->pinning, NULL);
        if (!first || !h->base || h->fd < 0 || h->count == 0) continue;
        for (uint32_t n = 1; n < h->nblocks; n++) { /* the child keeps even these to itself */
            const block_t *b = h->blocks + n;
            if (b->size && b->holders && b->holders != RETIRED && stays_shared(b))
                map_again(h, b->offset, b->offset + b->size, MAP_PRIVATE);
        }
        if (h->last_seen) map_privately(h, nforks);
        else map_again(h, 0, h->nbytes, MAP_PRIVATE); /* no memory to note granules in */
    }
    clear(aside, naside);
    naside = 0;
    unlock();
}

/* A duplicate of the read end of the pipe of this thread's last fork; -1: no child of it sees this memory, or an error. */
int dup_of_child(void) {
    int fd = -1;
    pthread_mutex_lock(&children_lock);
    for (uint32_t i = 0; i < nchildren && fd < 0; i++) /* another thread may have sorted out children that ended */
        if (children[i].number == own_fork && children[i].fd >= 0) fd = fcntl(children[i].fd, F_DUPFD_CLOEXEC, 3);
    pthread_mutex_unlock(&children_lock);
    return fd;
}
/* Close the descriptors of children that have ended, before the next fork or allocation does. */
void reap_children(void) {
    pthread_mutex_lock(&children_lock);
    look_after_children();
    pthread_mutex_unlock(&children_lock);
}
void add_heap(heap_t *h) {
    pthread_mutex_lock(&heaps_lock);
    h->next = heaps;
    heaps = h;
    pthread_mutex_unlock(&heaps_lock);
}
void remove_heap(heap_t *h) {
    pthread_mutex_lock(&heaps_lock);
    heap_t **at = &heaps;
    while (*at != h) at = &(*at)->next;
    *at = h->next;
    pthread_mutex_unlock(&heaps_lock);
}

static int fork_code;
static void register_handlers(void) { fork_code = pthread_atfork(before_fork, after_fork, after_fork_in_child); }
/* Register the handlers that take all heaps through a fork. A second set of handlers would wait for the locks of the
 * first, so only the first call registers. Returns 0 or an errno. */
int watch_forks(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_handlers);
    return fork_code;
}
