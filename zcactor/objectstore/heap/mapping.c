/* The mapping of an arena as a heap: making it, closing it, freeing it. */
#include "heap.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Make a heap over `nbytes` of `fd`, which is mapped here; the heap owns the descriptor. With fd -1 it is only an
 * allocator of offsets, with ANONYMOUS it has memory without a file. NULL with errno on failure. */
heap_t *heap_new(int fd, uint64_t nbytes, uint64_t extent) {
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
        /* Align to huge pages, without which the kernel gives none: reserve more, map inside, give back the rest. */
        uint64_t reserved = nbytes + GRANULE;
        char *space = MAP_FAILED;
        if (h->granules && h->pins)
            space = mmap(NULL, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
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
        h->advice_ignored = !h->anonymous && advice_is_ignored(h);
        h->huge_on_advice = !h->anonymous && huge_on_advice();
        /* EINVAL: the kernel has no huge pages, and small pages will do. */
        if (!h->anonymous) madvise(h->base, nbytes, MADV_HUGEPAGE);
    }
    add_heap(h);
    return h;
}
/* Allocate nothing more. Free memory goes back now, other memory as it is freed, and pinned memory with `unpin_all`. */
void heap_close(heap_t *h) {
    pthread_mutex_lock(&h->pinning); /* `pin` needs the descriptor, and may run without a block */
    pthread_mutex_lock(&h->lock);
    h->closed = 1;
    h->event_fd = h->growth_fd = -1;
    if (h->count == 0) close_fd(h); /* otherwise a fork needs it */
    pthread_mutex_unlock(&h->lock);
    pthread_mutex_unlock(&h->pinning);
    if (h->base && !h->foreign) trim(h, 0, UINT64_MAX);
}
void free_groups(group_t *groups, size_t n) {
    for (size_t i = 0; i < n; i++) {
        free(groups[i].limit);
        free(groups[i].usage);
        free(groups[i].statistics);
        free(groups[i].inactive);
    }
    free(groups);
}
void heap_free(heap_t *h) {
    remove_heap(h);
    if (h->base) munmap(h->base, h->nbytes);
    close_fd(h);
    free(h->granules);
    free(h->pins);
    free(h->first_seen);
    free(h->last_seen);
    free(h->blocks);
    free_groups(h->groups, h->ngroups);
    pthread_mutex_destroy(&h->lock);
    pthread_mutex_destroy(&h->pinning);
    pthread_mutex_destroy(&h->trimming);
    pthread_mutex_destroy(&h->punching);
    free(h);
}
