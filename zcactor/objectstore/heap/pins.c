/* Memory that is never given back, because a network card has registered it.
 *
 * A card reads and writes the pages themselves, and keeps them when the file gets other pages: registered memory must
 * never be punched.
 *
 * The rule: after releasing a lock, read every field again, beginning with `blocks`, which moves when it grows. Hold a
 * block that is used across the release.
 */
#include "heap.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Set or clear the pin of a granule. Returns 0 or an errno. */
static int set_pinned(heap_t *h, uint64_t granule, int yes) {
    uint64_t end = granule_end(h, granule), nbytes = end - granule * GRANULE;
    pthread_mutex_lock(&h->punching); /* a thread that punches sees the pin from here on, or has punched before */
    pthread_mutex_lock(&h->lock);
    /* The range joins the free blocks: it is warm now, and `trim` gives it back once it is unpinned. */
    int code = end > h->capacity ? grow(h, h->capacity, end - h->capacity) : 0;
    if (code == 0) {
        /* A card that registers a private granule pins the private pages: they must stay. */
        if (yes && h->first_seen && h->first_seen[granule]) h->last_seen[granule] = UINT32_MAX;
        h->pins[granule / 64] ^= 1ull << granule % 64;
        h->pinned += yes ? nbytes : -nbytes;
        h->pinned_used += yes ? used_in(h, granule) : -used_in(h, granule);
    }
    pthread_mutex_unlock(&h->lock);
    pthread_mutex_unlock(&h->punching);
    return code;
}
/* Take memory for a granule, with an owner or without, and enter it into the page table. Returns 0 or an errno. */
static int populate(heap_t *h, uint64_t granule) {
    uint64_t low = granule * GRANULE, high = granule_end(h, granule);
    int code = is_committed(h, granule) ? populate_range(h, low, high - low) : commit_range(h, low, high, 1);
    if (code > 0) return code; /* memory taken stays in the file: the granule's owner may be committing it now */
    set_committed(h, granule, 1);
    return 0;
}
/* Commit the granules of [offset, offset + nbytes), with owners or without, and keep them. Each granule is marked
 * first, under the lock that punching needs, and then populated under no lock that other threads need. Returns 0; an
 * errno, after which no more is pinned than before; or -1: the heap is closed. */
int pin(heap_t *h, uint64_t offset, uint64_t nbytes) {
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
/* Unpin everything, because nothing is registered any more: the memory is like any committed memory. */
void unpin_all(heap_t *h) {
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
    if (closed && h->base) trim(h, 0, UINT64_MAX); /* `heap_close` could not do this for pinned memory */
}
