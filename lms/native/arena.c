/* Plays the calls of steps in a simulated allocator: the loop of lms/simulate/bfc_arena.py, compiled.

   It follows that loop line by line, for chunks that no two variables share; a test compares the two. It
   needs nothing but numbers, so one file serves every Python. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

static const int64_t NONE = INT64_MIN;

typedef struct Pair { int64_t first, second; } Pair;

/* --- a map of numbers to numbers, with linear probing ------------------------------------------------ */

typedef struct Map {
  Pair* slots; /* a key NONE: empty */
  uint64_t mask;
} Map;

static int map_init(Map* map, int64_t most) {
  uint64_t count = 64;
  while (count < 2 * (uint64_t)most) count *= 2;
  map->mask = count - 1;
  map->slots = malloc(count * sizeof(Pair));
  if (!map->slots) return 0;
  for (uint64_t i = 0; i < count; ++i) map->slots[i].first = NONE;
  return 1;
}

static uint64_t home(const Map* map, int64_t key) {
  return ((uint64_t)key * UINT64_C(0x9E3779B97F4A7C15) >> 20) & map->mask;
}

static void map_put(Map* map, int64_t key, int64_t value) {
  uint64_t at = home(map, key);
  while (map->slots[at].first != NONE && map->slots[at].first != key) at = (at + 1) & map->mask;
  map->slots[at] = (Pair){key, value};
}

static int64_t map_pop(Map* map, int64_t key) { /* NONE: it is not there */
  uint64_t at = home(map, key);
  while (map->slots[at].first != key) {
    if (map->slots[at].first == NONE) return NONE;
    at = (at + 1) & map->mask;
  }
  int64_t value = map->slots[at].second;
  for (uint64_t next = (at + 1) & map->mask; map->slots[next].first != NONE; next = (next + 1) & map->mask) {
    uint64_t wanted = home(map, map->slots[next].first);
    if (((next - wanted) & map->mask) >= ((next - at) & map->mask)) { /* it may lie in the gap */
      map->slots[at] = map->slots[next];
      at = next;
    }
  }
  map->slots[at].first = NONE;
  return value;
}

/* --- free chunks, by bytes and offset ---------------------------------------------------------------- */

typedef struct Free {
  Pair* chunks;
  int64_t count;
} Free;

static int64_t lower_bound(const Free* list, int64_t nbytes, int64_t offset) {
  int64_t low = 0, high = list->count;
  while (low < high) {
    int64_t middle = (low + high) / 2;
    const Pair* chunk = &list->chunks[middle];
    if (chunk->first < nbytes || (chunk->first == nbytes && chunk->second < offset)) low = middle + 1;
    else high = middle;
  }
  return low;
}

static void list_insert(Free* list, int64_t nbytes, int64_t offset) {
  int64_t at = lower_bound(list, nbytes, offset);
  memmove(&list->chunks[at + 1], &list->chunks[at], (size_t)(list->count++ - at) * sizeof(Pair));
  list->chunks[at] = (Pair){nbytes, offset};
}

static void list_remove(Free* list, int64_t at) {
  memmove(&list->chunks[at], &list->chunks[at + 1], (size_t)(--list->count - at) * sizeof(Pair));
}

/* --- the loop ---------------------------------------------------------------------------------------- */

typedef struct LmsArena { /* as in lms/native/arena.py */
  int64_t used, peak;
  int64_t steps; /* those to do; at the end those left, of which the first has stopped */
  int64_t call;  /* the one to begin with; at the end that which found no chunk, or the count of calls */
  int64_t free_count, taken_count, largest_waste;
  Pair* free;  /* bytes and offset, ascending */
  Pair* taken; /* offset and bytes, in any order */
} LmsArena;

typedef struct State {
  Free free;
  Map taken, begins, ends;
  int64_t room; /* the most chunks, free ones and those in use */
} State;

static void release(LmsArena* arena, State* now, int64_t offset) {
  int64_t size = map_pop(&now->taken, offset);
  if (size == NONE) return; /* a filler that took nothing */
  int64_t end = offset + size;
  arena->used -= size;
  arena->taken_count--;
  int64_t behind = map_pop(&now->begins, end);
  if (behind != NONE) {
    list_remove(&now->free, lower_bound(&now->free, behind - end, end));
    end = behind;
  }
  int64_t before = map_pop(&now->ends, offset);
  if (before != NONE) {
    list_remove(&now->free, lower_bound(&now->free, offset - before, before));
    offset = before;
  }
  map_put(&now->begins, offset, end);
  map_put(&now->ends, end, offset);
  list_insert(&now->free, end - offset, offset);
}

static int64_t allocate(LmsArena* arena, State* now, int64_t nbytes) { /* NONE: no chunk is large enough */
  int64_t index = lower_bound(&now->free, nbytes, NONE);
  if (index == now->free.count) return NONE;
  int64_t size = now->free.chunks[index].first, offset = now->free.chunks[index].second;
  list_remove(&now->free, index);
  int64_t end = map_pop(&now->begins, offset), rest = size - nbytes;
  if (rest >= nbytes || rest >= arena->largest_waste) {
    size = nbytes;
    map_put(&now->begins, offset + nbytes, end);
    map_put(&now->ends, end, offset + nbytes);
    list_insert(&now->free, rest, offset + nbytes);
  } else {
    map_pop(&now->ends, end);
  }
  map_put(&now->taken, offset, size);
  arena->taken_count++;
  arena->used += size;
  if (arena->used > arena->peak) arena->peak = arena->used;
  return offset;
}

/* Returns the most chunks that there are at once in steps that free what they take: of free ones no two touch,
   but for those of two regions. Other steps are given back. */
static int64_t most_chunks(const LmsArena* arena, const Pair* calls, int64_t count) {
  int64_t live = 0, most = 0;
  for (int64_t i = 0; i < count; ++i) {
    live += (calls[i].second > 0) - !calls[i].second;
    if (live > most) most = live;
  }
  return arena->free_count + 2 * (arena->taken_count + most) + 2;
}

static int open_state(const LmsArena* arena, State* now, int64_t room) {
  now->room = room;
  now->free.chunks = malloc((size_t)room * sizeof(Pair));
  if (!now->free.chunks || !map_init(&now->taken, room)) return 0;
  if (!map_init(&now->begins, room) || !map_init(&now->ends, room)) return 0;
  now->free.count = arena->free_count;
  for (int64_t i = 0; i < arena->free_count; ++i) {
    int64_t size = arena->free[i].first, offset = arena->free[i].second;
    now->free.chunks[i] = arena->free[i];
    map_put(&now->begins, offset, offset + size);
    map_put(&now->ends, offset + size, offset);
  }
  for (int64_t i = 0; i < arena->taken_count; ++i) {
    map_put(&now->taken, arena->taken[i].first, arena->taken[i].second);
  }
  return 1;
}

static int play(LmsArena* arena, State* now, const Pair* calls, int64_t count, const Pair* moves,
                int64_t move_count, int64_t* chunks, int64_t registers) {
  for (; arena->steps; --arena->steps, arena->call = 0) {
    for (; arena->call < count; ++arena->call) {
      int64_t reg = calls[arena->call].first, nbytes = calls[arena->call].second;
      if (reg < 0 || reg >= registers) return 0;
      if (nbytes < 0) continue; /* written to, and nobody else's */
      if (!nbytes) {
        release(arena, now, chunks[reg]);
        continue;
      }
      if (now->free.count + arena->taken_count >= now->room) return 0;
      int64_t offset = allocate(arena, now, nbytes);
      if (offset == NONE) return 1;
      chunks[reg] = offset;
    }
    for (int64_t i = 0; i < move_count; ++i) {
      int64_t to = moves[i].first, from = moves[i].second;
      if (to < 0 || to >= registers || from < 0 || from >= registers) return 0;
      chunks[to] = chunks[from];
    }
  }
  return 1;
}

EXPORT int lms_arena_version(void) { return 2; }

/* Returns 1 and new lists, to be freed with lms_arena_free; 0 where memory or room does not do, or a register
   is not there, and then nothing is to be read. */
EXPORT int lms_arena_play(LmsArena* arena, const Pair* calls, int64_t count, const Pair* moves,
                          int64_t move_count, int64_t* chunks, int64_t registers) {
  State now = {{0}, {0}, {0}, {0}, 0};
  int done = open_state(arena, &now, most_chunks(arena, calls, count)) &&
             play(arena, &now, calls, count, moves, move_count, chunks, registers);
  free(now.begins.slots);
  free(now.ends.slots);
  if (!done) {
    free(now.taken.slots);
    free(now.free.chunks);
    return 0;
  }
  arena->free = now.free.chunks;
  arena->free_count = now.free.count;
  arena->taken = now.taken.slots; /* put together where they lie */
  arena->taken_count = 0;
  for (uint64_t i = 0; i <= now.taken.mask; ++i) {
    if (now.taken.slots[i].first != NONE) arena->taken[arena->taken_count++] = now.taken.slots[i];
  }
  return 1;
}

EXPORT void lms_arena_free(const LmsArena* arena) {
  free(arena->free);
  free(arena->taken);
}
