/* The memory behind the blocks, by granules: committing it before use, and giving free memory back.
 *
 * No function here is called under the heap's lock: each waits for the system. The owner of a block commits and punches
 * its granules. A granule at either end of a block may have several owners.
 *
 * The rule: after releasing a lock, read every field again, beginning with `blocks`, which moves when it grows. Hold a
 * block that is used across the release.
 */
#include "heap.h"
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* since Linux 5.14 */
#endif
#define CHUNK ((uint64_t)16 << 20)    /* bytes per fallocate(2); the kernel undoes it on a signal, and we repeat it */
#define PARALLEL ((uint64_t)32 << 20) /* bytes from which threads commit: a start costs 50 us, 32 MiB take 10 ms */
#define CHECKED ((uint64_t)16 << 20)  /* bytes committed between checks of the control groups, and kept free there */
#define MAX_THREADS 4                 /* four reach the bandwidth of one socket */

void set_committed(heap_t *h, uint64_t granule, int yes) {
    uint64_t bit = 1ull << granule % 64, nbytes = granule_end(h, granule) - granule * GRANULE;
    uint64_t before = yes ? __atomic_fetch_or(h->granules + granule / 64, bit, __ATOMIC_ACQ_REL)
                          : __atomic_fetch_and(h->granules + granule / 64, ~bit, __ATOMIC_ACQ_REL);
    if (!(before & bit) == !yes) return;
    if (yes) __atomic_fetch_add(&h->committed, nbytes, __ATOMIC_RELAXED);
    else __atomic_fetch_sub(&h->committed, nbytes, __ATOMIC_RELAXED);
}
int posix_take(heap_t *h, uint64_t offset, uint64_t nbytes) {
    int code;
    if (h->anonymous) return 0; /* page faults find the memory */
    do code = posix_fallocate(h->fd, (off_t)offset, (off_t)nbytes);
    while (code == EINTR);
    return code;
}
/* Enter pages into the page table, as if they were written to. Returns 0, an errno, or -1: the kernel cannot (before
 * 5.14). */
int populate_range(heap_t *h, uint64_t at, uint64_t nbytes) {
    if (!__atomic_load_n(&h->can_populate, __ATOMIC_RELAXED)) return -1;
    while (madvise(h->base + at, nbytes, MADV_POPULATE_WRITE)) {
        if (errno == EINTR || errno == EAGAIN) continue;
        if (errno != EINVAL) return errno;
        __atomic_store_n(&h->can_populate, 0, __ATOMIC_RELAXED);
        return -1;
    }
    return 0;
}
/* fallocate(2) is faster than faults for small pages, and gives huge pages only where they need no advice. */
int commit_range(heap_t *h, uint64_t low, uint64_t high, int populate) {
    for (uint64_t at = low; at < high; at += CHUNK) {
        uint64_t nbytes = high - at < CHUNK ? high - at : CHUNK;
        int code = h->huge_on_advice ? populate_range(h, at, nbytes) : -1;
        if (code < 0) {
            if ((code = h->fallocate(h, at, nbytes))) return code;
            /* Where the kernel cannot populate, page faults find the memory. */
            if (populate && (code = populate_range(h, at, nbytes)) < 0) code = 0;
        }
        if (code) return code;
    }
    return 0;
}
int huge_on_advice(void) {
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
        uint64_t start = low + each * (uint64_t)i, stop = start + each;
        part_t part = {.heap = h, .low = start < high ? start : high, .high = stop < high ? stop : high};
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
/* The number in a file, or in its line that begins with `key` and a blank; -1 without a number, or without a limit
 * ("max"). */
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
/* Whether a control group has less left than `nbytes` plus CHECKED, which stands for bytes that are not checked: taking
 * them would get a process of the group killed. Another process may take the rest a moment later; the kernel has no way
 * to check and take in one step. */
static int exceeds_groups(heap_t *h, uint64_t nbytes) {
    if (h->ngroups == 0 || nbytes == 0) return 0;
    if (__atomic_add_fetch(&h->unchecked, nbytes, __ATOMIC_RELAXED) < CHECKED) return 0;
    for (unsigned i = 0; i < h->ngroups; i++) {
        group_t *group = h->groups + i;
        int64_t limit = number_in(group->limit, NULL), usage = limit < 0 ? -1 : number_in(group->usage, NULL);
        if (usage < 0) continue;
        int64_t inactive = number_in(group->statistics, group->inactive);
        if (limit - usage + (inactive < 0 ? 0 : inactive) < (int64_t)(nbytes + CHECKED)) {
            __atomic_store_n(&h->unchecked, CHECKED, __ATOMIC_RELAXED); /* the next request is checked, too */
            return 1;
        }
    }
    __atomic_store_n(&h->unchecked, 0, __ATOMIC_RELAXED);
    return 0;
}
/* Give memory back; it reads as zeros then. */
static int punch(heap_t *h, uint64_t low, uint64_t high) {
    if (h->advice_ignored)
        return fallocate(h->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)low, (off_t)(high - low)) ? errno : 0;
    return madvise(h->base + low, high - low, h->anonymous ? MADV_DONTNEED : MADV_REMOVE) ? errno : 0;
}
/* Whether the system takes the advice to remove pages for nothing, and reports success, as qemu-user does: blocks that are
 * promised to be zeros would have other objects' bytes. Tried with the first page, which nobody uses yet. */
int advice_is_ignored(heap_t *h) {
    char byte = 1;
    if (pwrite(h->fd, &byte, 1, 0) != 1) return 0; /* no memory: the first commit says so */
    int ignored = madvise(h->base, PAGE, MADV_REMOVE) == 0 && pread(h->fd, &byte, 1, 0) == 1 && byte != 0;
    fallocate(h->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, PAGE);
    return ignored;
}
/* Take memory for [offset, offset + nbytes), which the caller owns. Returns 0 or an errno, EDQUOT for a control group's
 * limit; memory taken on the way is given back then. A neighbour may take a granule at either end at the same time,
 * which is harmless: fallocate does not write. */
static int commit(heap_t *h, uint64_t offset, uint64_t nbytes) {
    if (nbytes == 0) return 0;
    if (exceeds_groups(h, missing(h, offset, nbytes))) return EDQUOT;
    uint64_t first = offset / GRANULE, last = (offset + nbytes - 1) / GRANULE;
    for (uint64_t g = first; g <= last; g++) {
        if (is_committed(h, g)) continue;
        uint64_t stop = g + 1;
        while (stop <= last && !is_committed(h, stop)) stop++;
        uint64_t low = g * GRANULE, high = granule_end(h, stop - 1);
        int code = high - low >= PARALLEL ? commit_parallel(h, low, high)
                                          : commit_range(h, low, high, high - low > GRANULE);
        if (code) {
            uint64_t inner = (offset + GRANULE - 1) / GRANULE * GRANULE, end = (offset + nbytes) / GRANULE * GRANULE;
            if (low < inner) low = inner;
            if (high > end) high = end;
            /* Only `pin` commits inside, too. A granule that cannot be punched stays in the file, unused. */
            for (; low < high; low += GRANULE) {
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
/* `commit`, tried again when the system has no memory left, after giving back the idle memory of this heap. */
int commit_surely(heap_t *h, uint64_t offset, uint64_t nbytes) {
    int code = commit(h, offset, nbytes);
    if (code && code != EIO && trim(h, 0, UINT64_MAX)) code = commit(h, offset, nbytes);
    return code;
}
/* Zero [offset, offset + nbytes) and commit it. Only committed granules are written to: fresh pages are zero. */
int commit_zeroed(heap_t *h, uint64_t offset, uint64_t nbytes) {
    uint64_t stop = offset + nbytes;
    for (uint64_t g = offset / GRANULE; g * GRANULE < stop; g++) {
        if (!is_committed(h, g)) continue; /* our part of the granule is zero, even if another thread commits it now */
        uint64_t low = g * GRANULE > offset ? g * GRANULE : offset, end = granule_end(h, g);
        memset(h->base + low, 0, (end < stop ? end : stop) - low);
    }
    return commit_surely(h, offset, nbytes);
}
static int may_go(heap_t *h, uint64_t granule) { return is_committed(h, granule) && !is_pinned(h, granule); }
/* Punch a granule where the system refused to take several at once, for instance where pages are locked by mlock(2): it
 * may have taken the pages before them. The granule's bytes are not needed. Returns the bytes given back, or 0: the
 * granule is committed as before. */
static uint64_t punch_granule(heap_t *h, uint64_t granule) {
    uint64_t low = granule * GRANULE, high = granule_end(h, granule);
    if (punch(h, low, high)) {
        if (posix_take(h, low, high - low) == 0) return 0;
        /* No memory replaces the missing pages now: punch the others as far as possible. Pages that stay are zeroed, as
         * pages that come back will be. */
        for (uint64_t at = low; at < high; at += PAGE)
            if (punch(h, at, at + PAGE)) memset(h->base + at, 0, PAGE);
    }
    set_committed(h, granule, 0);
    return high - low;
}
/* Punch the topmost granules of [first, *stop) that are neighbours and may be punched, no more than `room` bytes; *stop
 * becomes their beginning. Returns the bytes given back; 0: no granule may be punched, or the system refuses. */
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
/* Punch whole granules of a block that the caller owns, no more than `at_most` bytes. Returns the bytes given back. */
uint64_t punch_block(heap_t *h, uint64_t offset, uint64_t size, uint64_t at_most) {
    uint64_t first = (offset + GRANULE - 1) / GRANULE, stop = (offset + size) / GRANULE, given = 0, more;
    if (offset + size == h->nbytes) stop = (h->nbytes + GRANULE - 1) / GRANULE;
    do { /* from the top: memory that stays warm lies low, where the next allocation looks */
        more = punch_top(h, first, &stop, at_most - given < CHUNK ? at_most - given : CHUNK);
        given += more;
    } while (more);
    return given;
}
/* Give back memory of free blocks, the largest first, as long as at least `keep` bytes stay committed, and at most
 * `at_most` bytes a call. Returns the bytes given back. */
uint64_t trim(heap_t *h, uint64_t keep, uint64_t at_most) {
    uint64_t given = 0, size = UINT64_MAX, offset = 0;
    while (given < at_most && !h->foreign) {
        pthread_mutex_lock(&h->trimming);
        pthread_mutex_lock(&h->lock);
        settle(h);
        if (h->nprivate) reclaim(h);
        uint32_t n = free_before(h, size, offset);
        uint64_t committed = __atomic_load_n(&h->committed, __ATOMIC_RELAXED);
        if (n == NIL || h->blocks[n].size < GRANULE || committed <= keep) {
            pthread_mutex_unlock(&h->lock);
            pthread_mutex_unlock(&h->trimming);
            break;
        }
        h->busy_trimming = 1;
        remove_free(h, n);
        h->blocks[n].holders = 1; /* held by us while the lock is released */
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
