// Block barriers and warp collectives.
#include "engine.h"

#ifdef EMULATOR_TSAN
#include <sanitizer/tsan_interface.h>
#endif

namespace emulator {

namespace {

bool has(uint32_t mask, unsigned lane) { return (mask >> lane & 1) != 0; }

void maybe_yield() {
  if (engine.config.policy >= random_order && random_number() % 4 == 0) yield();
}

// TSan: which address stands for this meeting. Two in a row of one warp must differ.
[[maybe_unused]] char* meeting_point(const Thread& thread, unsigned number) { return engine.sync_points + 64 + thread.linear / kWarpSize * 64 + number % 64; }

Meeting& join(Warp& warp, uint32_t mask, const char* what, Site site) {
  for (int i = 0; i < warp.num_meetings; ++i) {
    Meeting& meeting = warp.meetings[i];
    if (meeting.mask == mask) {
      if (meeting.what != what || (engine.config.is_strict && meeting.site.line != site.line)) {
        fail("%s at %s:%d meets %s at %s:%d: lanes of one mask in different collectives", what, site.file, site.line, meeting.what, meeting.site.file,
             meeting.site.line);
      }
      return meeting;
    }
    if ((meeting.mask & mask) != 0) {
      fail("%s at %s:%d with mask %08x meets %s at %s:%d with mask %08x: lanes in two collectives", what, site.file, site.line, mask, meeting.what,
           meeting.site.file, meeting.site.line, meeting.mask);
    }
  }
  if (warp.num_meetings == kMaxMeetings) fail("more than %d collectives at once in a warp", kMaxMeetings);
  return warp.meetings[warp.num_meetings++] = Meeting{mask, 0, what, site, warp.next_number++};
}

void end_meeting(Warp& warp, Meeting& meeting, Finish finish, unsigned last_lane) {
  const uint32_t lanes = meeting.arrived;
  meeting = warp.meetings[--warp.num_meetings];
  if (finish != nullptr) finish(warp, lanes);
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if (has(lanes, lane) && lane != last_lane) make_ready(warp.lanes[lane]);
  }
}

void open_barrier(Barrier& barrier) {
  barrier.result = barrier.tally;
  barrier.arrived = 0;
  ++barrier.phase;
  for (unsigned i = 0; i < engine.num_threads; ++i) {
    Thread& thread = engine.threads[i];
    if (thread.state == State::waiting && thread.waits_for == &barrier) make_ready(&thread);
  }
}

struct Shuffle {
  const unsigned char* in;
  unsigned char* out;
  int num_bytes, source_lane;

  static void finish(Warp& warp, uint32_t mask) {
    for (unsigned lane = 0; lane < kWarpSize; ++lane) {
      if (!has(mask, lane)) continue;
      Shuffle& mine = *static_cast<Shuffle*>(warp.payloads[lane]);
      const unsigned source = static_cast<unsigned>(mine.source_lane);
      const unsigned char* from = has(mask, source) ? static_cast<Shuffle*>(warp.payloads[source])->in : nullptr;
      for (int i = 0; i < mine.num_bytes; ++i) mine.out[i] = from != nullptr ? from[i] : 0xff;  // undefined on hardware: NaN here
    }
  }
};

struct Vote {
  bool predicate;
  uint32_t result;

  static void finish(Warp& warp, uint32_t mask) {
    uint32_t result = 0;
    for (unsigned lane = 0; lane < kWarpSize; ++lane) {
      if (has(mask, lane) && static_cast<Vote*>(warp.payloads[lane])->predicate) result |= 1u << lane;
    }
    for (unsigned lane = 0; lane < kWarpSize; ++lane) {
      if (has(mask, lane)) static_cast<Vote*>(warp.payloads[lane])->result = result;
    }
  }
};

struct Reduce {
  int64_t value;
  Reduction reduction;

  void take(int64_t other) {
    switch (reduction) {
      case Reduction::add: value += other; break;
      case Reduction::min: value = other < value ? other : value; break;
      case Reduction::max: value = other > value ? other : value; break;
      case Reduction::bit_and: value &= other; break;
      case Reduction::bit_or: value |= other; break;
      case Reduction::bit_xor: value ^= other; break;
    }
  }
  static void finish(Warp& warp, uint32_t mask) {
    Reduce* first = nullptr;
    for (unsigned lane = 0; lane < kWarpSize; ++lane) {
      if (!has(mask, lane)) continue;
      Reduce* mine = static_cast<Reduce*>(warp.payloads[lane]);
      if (first == nullptr) {
        first = mine;
      } else {
        first->take(mine->value);
      }
    }
    for (unsigned lane = 0; lane < kWarpSize; ++lane) {
      if (has(mask, lane)) static_cast<Reduce*>(warp.payloads[lane])->value = first->value;
    }
  }
};

struct Match {
  uint64_t value;
  uint32_t result;

  static void finish(Warp& warp, uint32_t mask) {
    for (unsigned lane = 0; lane < kWarpSize; ++lane) {
      if (!has(mask, lane)) continue;
      Match& mine = *static_cast<Match*>(warp.payloads[lane]);
      mine.result = 0;
      for (unsigned other = 0; other < kWarpSize; ++other) {
        if (has(mask, other) && static_cast<Match*>(warp.payloads[other])->value == mine.value) mine.result |= 1u << other;
      }
    }
  }
};

}  // namespace

void meet(uint32_t mask, void* payload, Finish finish, [[maybe_unused]] bool orders_memory, const char* what, Site site) {
  Thread& thread = *engine.current;
  Warp& warp = *thread.warp;
  const uint32_t bit = 1u << thread.lane;
  mask &= warp.existing;
  if ((mask & bit) == 0) fail("%s at %s:%d: the mask %08x lacks the calling lane %u", what, site.file, site.line, mask, thread.lane);
  if (engine.config.is_strict && (mask & ~warp.live) != 0) {
    fail("%s at %s:%d: the mask %08x names lanes that have exited (live %08x)", what, site.file, site.line, mask, warp.live);
  }
  Meeting& meeting = join(warp, mask & warp.live, what, site);
#ifdef EMULATOR_TSAN
  char* point = meeting_point(thread, meeting.number);
  if (orders_memory) __tsan_release(point);
#endif
  warp.payloads[thread.lane] = payload;
  meeting.arrived |= bit;
  if (meeting.arrived == meeting.mask) {
    end_meeting(warp, meeting, finish, thread.lane);
    maybe_yield();
  } else {
    wait_here(what, site);
  }
#ifdef EMULATOR_TSAN
  if (orders_memory) __tsan_acquire(point);
#endif
}

void shuffle(uint32_t mask, const void* in, void* out, int num_bytes, int source_lane, const char* what, Site site) {
  Shuffle payload{static_cast<const unsigned char*>(in), static_cast<unsigned char*>(out), num_bytes, source_lane};
  meet(mask, &payload, &Shuffle::finish, false, what, site);
}

uint32_t vote(uint32_t mask, bool predicate, const char* what, Site site) {
  Vote payload{predicate, 0};
  meet(mask, &payload, &Vote::finish, false, what, site);
  return payload.result;
}

int64_t reduce(uint32_t mask, int64_t value, Reduction reduction, const char* what, Site site) {
  Reduce payload{value, reduction};
  meet(mask, &payload, &Reduce::finish, false, what, site);
  return payload.value;
}

uint32_t match_any(uint32_t mask, uint64_t value, Site site) {
  Match payload{value, 0};
  meet(mask, &payload, &Match::finish, false, "__match_any_sync", site);
  return payload.result;
}

int block_barrier(int predicate, Tally tally, Site site) {
  Barrier& barrier = engine.barriers[0];
  [[maybe_unused]] const unsigned phase = barrier.phase;
  if (barrier.arrived == 0) {
    barrier.site = site;
    barrier.tally = tally == Tally::all ? 1 : 0;
  } else if (engine.config.is_strict && (barrier.site.line != site.line || barrier.site.file != site.file)) {
    fail("divergent __syncthreads: %s:%d meets %s:%d", site.file, site.line, barrier.site.file, barrier.site.line);
  }
  if (tally == Tally::count) barrier.tally += predicate != 0;
  if (tally == Tally::all) barrier.tally &= predicate != 0;
  if (tally == Tally::any) barrier.tally |= predicate != 0;
#ifdef EMULATOR_TSAN
  char* point = engine.sync_points + (phase & 1);
  __tsan_release(point);
#endif
  ++barrier.arrived;
  if (engine.config.is_strict && engine.num_live < engine.num_threads) {
    fail("__syncthreads at %s:%d after %u threads of the block have exited", site.file, site.line, engine.num_threads - engine.num_live);
  }
  if (barrier.arrived >= engine.num_live) {
    open_barrier(barrier);
    maybe_yield();
  } else {
    wait_here("__syncthreads", site, &barrier);
  }
#ifdef EMULATOR_TSAN
  __tsan_acquire(point);
#endif
  return barrier.result;
}

void exit_checks(Thread* thread) {
  Warp& warp = *thread->warp;
  thread->state = State::done;
  warp.live &= ~(1u << thread->lane);
  --engine.num_live;
  if (thread->num_copies > 0) fail("the thread ends with %d cp.async copies that nobody waited for", thread->num_copies);
  for (int i = 0; i < warp.num_meetings; ++i) {
    const Meeting& meeting = warp.meetings[i];
    if (!has(meeting.mask, thread->lane)) continue;
    fail("lane exits while %s at %s:%d with mask %08x waits for it", meeting.what, meeting.site.file, meeting.site.line, meeting.mask);
  }
  Barrier& barrier = engine.barriers[0];
  if (barrier.arrived > 0) {
    if (engine.config.is_strict) fail("thread exits while others wait at __syncthreads %s:%d", barrier.site.file, barrier.site.line);
    if (barrier.arrived >= engine.num_live) open_barrier(barrier);
  }
}

}  // namespace emulator
