/* The blocks of a heap: best fit with immediate coalescing, the lowest address among equals.
 *
 * Blocks stand in trees (trees.h), free blocks in one tree for each size class. Neighbours in memory are linked
 * (Knuth's boundary tags, kept beside the memory instead of in it, which peers can write to).
 *
 * The rule: after releasing a lock, read every field again, beginning with `blocks`, which moves when it grows. Hold a
 * block that is used across the release.
 */
#include "trees.h"
#include <errno.h>
#include <stdlib.h>

/* ---------------------------------------------------------------- records */

/* Make room for `n` more records. Returns 0, or -1: no memory. */
int have_records(heap_t *h, uint32_t n) {
    uint32_t there = 0;
    for (uint32_t i = h->unused; i != NIL && there < n; i = h->blocks[i].left) there++;
    if (there + (h->room - h->nblocks) >= n) return 0;
    uint32_t room = h->room ? h->room * 2 : 64;
    if (room > UINT32_MAX / 2) return -1;
    block_t *blocks = realloc(h->blocks, room * sizeof *blocks);
    if (!blocks) return -1;
    h->blocks = blocks;
    h->room = room;
    if (h->nblocks == 0) h->nblocks = 1; /* record 0 is NIL */
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
    h->blocks[n].size = 0; /* size 0 marks an unused record */
    h->unused = n;
}

/* ---------------------------------------------------------------- free blocks */

void add_free(heap_t *h, uint32_t n) {
    int bin = bin_of(h->blocks[n].size);
    h->blocks[n].holders = 0;
    tree_insert(h, h->bins + bin, n, 1);
    h->filled[bin / 64] |= 1ull << bin % 64;
}
void remove_free(heap_t *h, uint32_t n) {
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
uint64_t tail_free(const heap_t *h) {
    return h->tail != NIL && h->blocks[h->tail].holders == 0 ? h->blocks[h->tail].size : 0;
}
uint64_t largest_free(const heap_t *h) {
    uint32_t n = largest_block(h);
    uint64_t size = n == NIL ? 0 : h->blocks[n].size;
    if (h->base) { /* memory that is not handed out yet joins the tail */
        uint64_t end = tail_free(h) + h->nbytes - h->capacity;
        if (end > size) size = end;
    }
    return size;
}
/* Cut block `n` after `size` bytes. The rest becomes a record of its own, in no tree. */
uint32_t cut(heap_t *h, uint32_t n, uint64_t size) {
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
/* Join block `n` with its successor, which is in no tree. */
void join_after(heap_t *h, uint32_t n) {
    block_t *b = h->blocks + n;
    uint32_t gone = b->after;
    b->size += h->blocks[gone].size;
    b->after = h->blocks[gone].after;
    if (b->after != NIL) h->blocks[b->after].before = n;
    if (h->tail == gone) h->tail = n;
    drop_record(h, gone);
}
/* Make `n`, which is in no tree, free: one block with the free blocks beside it. */
void coalesce(heap_t *h, uint32_t n) {
    uint32_t before = h->blocks[n].before, after = h->blocks[n].after;
    if (after != NIL && h->blocks[after].holders == 0) { remove_free(h, after); join_after(h, n); }
    if (before != NIL && h->blocks[before].holders == 0) { remove_free(h, before); join_after(h, before); n = before; }
    add_free(h, n);
}
/* The pinned bytes of [offset, offset + size). */
static uint64_t pinned_in(const heap_t *h, uint64_t offset, uint64_t size) {
    uint64_t sum = 0, stop = offset + size;
    for (uint64_t g = offset / GRANULE; h->pinned && g * GRANULE < stop; g++)
        if (is_pinned(h, g)) {
            uint64_t low = g * GRANULE, high = low + GRANULE;
            sum += (high < stop ? high : stop) - (low > offset ? low : offset);
        }
    return sum;
}
/* Make the eventfd readable, once, when a block was handed out whose end lies above the limit. Called under the
 * lock. */
void tell_of_growth(heap_t *h) {
    uint64_t one = 1;
    if (h->growth_fd >= 0 && h->high > h->growth_limit && write(h->growth_fd, &one, sizeof one) == sizeof one)
        h->growth_fd = -1;
}
/* Note that the block at `offset` takes `now` bytes instead of `before`; 0 stands for a block that is not allocated. */
static void note_used(heap_t *h, uint64_t offset, uint64_t before, uint64_t now) {
    h->used += now - before;
    h->pinned_used += pinned_in(h, offset, now) - pinned_in(h, offset, before);
    if (h->used > h->peak) h->peak = h->used;
    if (now && offset + now > h->high) { h->high = offset + now; tell_of_growth(h); }
}

/* ---------------------------------------------------------------- best fit; called under the lock */

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
            b->of_numpy = b->shown = b->seen = 0;
            tree_insert(h, &h->all, n, 0);
            h->count++;
            note_used(h, b->offset, 0, size);
            return n;
        }
    return NIL;
}
uint32_t block_from(const heap_t *h, uint64_t offset) {
    uint32_t n = tree_first(h, h->all, 0, offset, 0);
    return n != NIL && n != h->spare && h->blocks[n].offset == offset ? n : NIL;
}
/* The first allocated block that begins at `offset` or above. */
uint32_t block_next(const heap_t *h, uint64_t offset) { return tree_first(h, h->all, 0, offset, 0); }
/* The allocated block that contains `offset`. */
uint32_t block_around(const heap_t *h, uint64_t offset) {
    uint32_t n = h->all, best = NIL;
    while (n != NIL) {
        if (h->blocks[n].offset <= offset) { best = n; n = h->blocks[n].right; }
        else n = h->blocks[n].left;
    }
    return best != NIL && best != h->spare && offset - h->blocks[best].offset < h->blocks[best].size ? best : NIL;
}
/* NumPy frees a temporary and allocates the same size again, over and over. So the block that it freed last stays in
 * the tree of allocated blocks, and is taken again in a few nanoseconds. A search for free blocks settles it first,
 * which makes it free. */
void settle(heap_t *h) {
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
    if (has_private(h, h->blocks[n].offset, h->blocks[n].size)) retire(h, n);
    else coalesce(h, n);
}
/* Add [offset, offset + nbytes). Returns 0, EINVAL (empty, or overlaps another extent) or ENOMEM. */
int grow(heap_t *h, uint64_t offset, uint64_t nbytes) {
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
/* `take`, which grows by extents: the untouched end of the arena must not be among the free blocks, or best fit would
 * sometimes prefer it to holes that are warm. */
static uint32_t place(heap_t *h, uint64_t nbytes, uint64_t alignment) {
    uint32_t n = take(h, nbytes, alignment);
    if (n == NIL && h->nprivate && reclaim(h)) n = take(h, nbytes, alignment);
    if (n != NIL || !h->base) return n;
    uint64_t size = (nbytes + alignment - 1) & -alignment, tail = h->capacity - tail_free(h);
    uint64_t start = (tail + alignment - 1) & -alignment;
    /* Even the whole arena is too small. */
    if (size < nbytes || start < tail || start > h->nbytes || size > h->nbytes - start) return NIL;
    /* The end is that of a granule: the memory of a granule that reaches beyond the capacity could not be given
     * back. */
    uint64_t end = start + size, least = h->nbytes - h->capacity < h->extent ? h->nbytes : h->capacity + h->extent;
    uint64_t step = h->extent < GRANULE ? PAGE : GRANULE;
    if (end < least) end = least;
    end = h->nbytes - end < step ? h->nbytes : (end + step - 1) & -step;
    if (grow(h, h->capacity, end - h->capacity)) return NIL;
    return take(h, nbytes, alignment);
}
/* The last free block that comes before (size, offset). */
uint32_t free_before(const heap_t *h, uint64_t size, uint64_t offset) {
    uint32_t best = NIL;
    for (int bin = bin_of(size); bin >= 0 && best == NIL; bin--)
        for (uint32_t n = h->bins[bin]; n != NIL;)
            if (precedes(h, n, size, offset, 1)) { best = n; n = h->blocks[n].right; }
            else n = h->blocks[n].left;
    return best;
}
/* Bytes of the used blocks within the granule. Called under the lock. */
uint64_t used_in(const heap_t *h, uint64_t granule) {
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

/* ---------------------------------------------------------------- holders; called without the lock */

/* `place`, once the block that is being trimmed is free again. Called under the lock, and releases it meanwhile. */
static __attribute__((noinline)) uint32_t place_after_trim(heap_t *h, uint64_t nbytes, uint64_t alignment) {
    uint32_t n = NIL;
    while (n == NIL && h->busy_trimming && !h->closed) {
        pthread_mutex_unlock(&h->lock);
        pthread_mutex_lock(&h->trimming);
        pthread_mutex_lock(&h->lock);
        n = h->closed ? NIL : place(h, nbytes, alignment);
        pthread_mutex_unlock(&h->trimming);
    }
    return n;
}
/* Allocate a block of `nbytes` with one holder. Returns its offset, or -1: nothing fits, or the heap is closed. The
 * block has no memory yet. Its id goes to `id`, if that is not NULL. */
int64_t allocate_with_id(heap_t *h, uint64_t nbytes, uint64_t alignment, int of_numpy, uint64_t *id) {
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
        if (n == NIL) n = place_after_trim(h, nbytes, alignment);
    }
    int64_t offset = -1;
    if (n != NIL) {
        block_t *b = h->blocks + n;
        offset = (int64_t)b->offset;
        b->of_numpy = of_numpy;
        if (of_numpy) h->of_numpy += b->size;
        if (id) *id = id_of(h, n);
    }
    pthread_mutex_unlock(&h->lock);
    return offset;
}
/* Bytes that are committed, free and not pinned. Called under the lock. */
uint64_t idle(const heap_t *h) {
    uint64_t committed = __atomic_load_n(&h->committed, __ATOMIC_RELAXED), kept = h->used + h->retired + h->pinned - h->pinned_used;
    return committed > kept ? committed - kept : 0;
}
/* Make the eventfd readable, once, when more than the limit is idle. Called under the lock. */
void tell_if_idle(heap_t *h) {
    uint64_t one = 1;
    if (!h->told && h->event_fd >= 0 && idle(h) > h->idle_limit)
        h->told = write(h->event_fd, &one, sizeof one) == sizeof one;
}
/* Remove one holder. Returns 0, or -1: nothing is allocated there. */
int release(heap_t *h, uint64_t offset, int of_numpy) {
    pthread_mutex_lock(&h->lock);
    uint32_t n = block_from(h, offset);
    if (n == NIL) { pthread_mutex_unlock(&h->lock); return -1; }
    block_t *b = h->blocks + n;
    int seen = has_private(h, offset, b->size);
    int spared = of_numpy && b->of_numpy && b->holders == 1 && !h->closed && !seen;
    if (of_numpy && b->of_numpy) { b->of_numpy = 0; h->of_numpy -= b->size; }
    int punches = 0, empty = 0;
    uint64_t size = b->size;
    if (b->holders > 1) b->holders--;
    else if (h->closed && h->base && !h->foreign && !seen && size >= GRANULE)
        punches = 1; /* the holder stays until the block is punched without the lock */
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
/* Resize in place a block of which the caller is the only holder. Returns 0, or -1: the block must move. */
int resize(heap_t *h, uint64_t offset, uint64_t nbytes) {
    int code = -1;
    uint64_t asked = 0;
    pthread_mutex_lock(&h->lock);
    settle(h);
    uint32_t n = h->closed ? NIL : block_from(h, offset);
    if (n != NIL && has_private(h, offset, h->blocks[n].size)) n = NIL; /* bytes that are cut off would have to be retired */
    if (n != NIL && h->blocks[n].holders == 1 && nbytes && nbytes <= INT64_MAX && have_records(h, 1) == 0) {
        block_t *b = h->blocks + n;
        uint64_t size = (nbytes + 63) & -(uint64_t)64, old = b->size;
        uint32_t after = b->after;
        if (size > old && after != NIL && h->blocks[after].holders == 0 && h->blocks[after].size >= size - old) {
            remove_free(h, after);
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
    if (code == 0 && h->base && commit_surely(h, offset, nbytes)) { /* it still has its old bytes, and may move */
        pthread_mutex_lock(&h->lock);
        h->blocks[n].asked = asked;
        pthread_mutex_unlock(&h->lock);
        code = -1;
    }
    return code;
}
