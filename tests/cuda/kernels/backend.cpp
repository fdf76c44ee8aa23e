// The backend's host side without torch, so that TSan sees all of it: steps one behind the other, their graphs being recorded, copies beside them, events asked
// for by several threads. The model is one layer of attention over embeddings, its output the logits.
//
// What a case touches from the host, results and pages that came free, is ordered by nothing but the calls that the engine makes, too.
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "copies.h"
#include "program.h"
#include "steps.h"

namespace {

using namespace pyserve;
using namespace pyserve::cuda;

constexpr int64_t kNumPages = 12, kPageSize = 4, kPageBytes = 2 * kPageSize * 64 * 2, kNumSequences = 4, kPagesEach = 2, kFreePage = 9;
constexpr int64_t kHeads = 2, kWidth = (kHeads + 2) * 64, kVocab = kHeads * 64, kMaxPositions = kPagesEach * kPageSize;

struct Decode {  // the rows of a step; lives as long as its step
  std::vector<int32_t> tokens, positions, sequences, table, samples;
  bool follows;
  const int32_t* picked = nullptr;

  Decode(int64_t first, int32_t position, bool follows) : follows(follows) {  // of the sequences from `first` on
    for (int32_t i = 0; first + i < kNumSequences; ++i) {
      tokens.push_back(follows ? -1 - i : i), positions.push_back(position), sequences.push_back(static_cast<int32_t>(first) + i), samples.push_back(i);
    }
    for (int32_t page = 0; page < kNumSequences * kPagesEach; ++page) table.push_back(page);
  }
  Batch batch() const {
    const auto count = static_cast<int64_t>(tokens.size());
    return {tokens.data(), {count, positions.data(), sequences.data(), table.data(), kPagesEach}, kNumSequences, samples.data(), count};
  }
};
using DecodePtr = std::shared_ptr<Decode>;

class Backend {
 public:
  Backend() : program_(device_, 8, 8), copies_(std::make_shared<CopyStream>(device_)) {
    std::vector<float> table(kVocab * kWidth), cos(kMaxPositions * 32, 1.f), sin(kMaxPositions * 32, 0.f);
    for (size_t i = 0; i < table.size(); ++i) table[i] = std::sin(static_cast<float>(i * i));
    const AttentionShape shape{0, kHeads, 1, 64};
    const int64_t qkv = program_.buffer(kWidth), out = program_.buffer(kVocab), logits = program_.buffer(kVocab);
    program_.embed({WeightType::f32, kVocab, kWidth, reinterpret_cast<const uint8_t*>(table.data())}, qkv, 1.f);
    program_.rope_kv_write(qkv, shape, {cos.data(), sin.data(), kMaxPositions, 64, false}, {nullptr, nullptr, 0.f});
    program_.attention(qkv, out, shape, 0.125f, 0, 0.f);
    program_.take_rows(out, logits);
    program_.set_logits(logits);
    program_.expect(kNumSequences, kPagesEach, kPageSize);
    program_.upload();
    pool_.need(kNumPages * kPageBytes);
    host_.need(kNumPages * kPageBytes);
  }
  ~Backend() { copies_->close(); }

  DecodePtr start(int64_t first, int position, bool follows) {
    auto step = std::make_shared<Decode>(first, position, follows);
    const Pool pool{pool_.as<uint8_t>(), DType::bf16, kNumPages, 1, 1, kPageSize, 64};
    steps_.start([this, step, pool] { step->picked = program_.post_greedy(step->batch(), pool, step->follows); });
    return step;
  }
  // Reads what was picked.
  int collect(const DecodePtr& step) {
    steps_.collect();
    int num_bad = 0;
    for (size_t i = 0; i < step->tokens.size(); ++i) num_bad += step->picked[i] < 0 || step->picked[i] >= kVocab;
    return num_bad;
  }
  std::shared_ptr<CopyEvent> copy(int64_t page, bool to_host) {
    PageCopy copy{pool_.as<uint8_t>(), kNumPages, kPageBytes, host_.as<uint8_t>(), kNumPages * kPageBytes, {Comb{page, 1, 1, 1, page}}, to_host};
    return copies_->post(copy, nullptr);
  }
  uint8_t* host(int64_t page) { return host_.as<uint8_t>() + page * kPageBytes; }
  // So many steps, each behind the one before it, with copies of a page of nobody's beside each.
  int decode(int num_steps) {
    int num_bad = 0;
    DecodePtr running = start(0, 0, false);
    for (int position = 1; position <= num_steps; ++position) {
      const DecodePtr next = position < num_steps ? start(0, position, true) : nullptr;
      std::memset(host(kFreePage), position, kPageBytes);
      const auto back = copy(kFreePage, false), out = copy(kFreePage, true);
      num_bad += collect(running);
      back->wait({}), out->wait({});
      num_bad += host(kFreePage)[7] != position;
      running = next;
    }
    return num_bad;
  }

 private:
  const std::shared_ptr<DeviceContext> device_ = std::make_shared<DeviceContext>(0);
  Program program_;
  Memory pool_, host_{Place::pinned};
  const std::shared_ptr<CopyStream> copies_;
  Steps steps_{device_};  // end first
};

int beside() { return Backend().decode(6); }

// Pages that came free when the step that wrote them was collected are filled beside the next one, which leaves their sequence out.
int free_pages() {
  Backend backend;
  int num_bad = backend.decode(3);
  const DecodePtr next = backend.start(1, 3, false);
  const auto back = backend.copy(0, false);
  num_bad += backend.collect(next);
  back->wait({});
  return num_bad;
}

// The mistakes that the engine must not make: a copy of a page that the step beside it writes.
int pages_of_the_step(bool to_host) {
  Backend backend;
  int num_bad = backend.decode(3);
  const DecodePtr next = backend.start(0, 3, false);
  const auto copied = backend.copy(0, to_host);
  num_bad += backend.collect(next);
  copied->wait({});
  return num_bad;
}

// What a collected step wrote, before and beside one that leaves its sequence out.
int parked() {
  Backend backend;
  int num_bad = backend.decode(3);
  const auto out = backend.copy(2, true);
  const DecodePtr next = backend.start(2, 3, false);
  const auto out_beside = backend.copy(0, true);
  while (!out->query() || !out_beside->query()) std::this_thread::yield();
  for (const int64_t page : {0, 2}) num_bad += backend.host(page)[0] == 0xff && backend.host(page)[1] == 0xff;
  return num_bad + backend.collect(next);
}

int asked_by_many() {
  Backend backend;
  const auto event = backend.copy(kFreePage, true);
  std::atomic<int> num_done{0};
  std::vector<std::thread> askers;
  for (int i = 0; i < 3; ++i)
    askers.emplace_back([&] {
      while (!event->query()) std::this_thread::yield();
      ++num_done;
    });
  for (std::thread& each : askers) each.join();
  return num_done != 3;
}

int teardown() {  // with a step and a copy under way
  Backend backend;
  backend.start(0, 0, false);
  backend.copy(kFreePage, true);
  return 0;
}

}  // namespace

extern "C" int backend_run(const char* name) {
  const std::string wanted(name);
  if (wanted == "beside") return beside();
  if (wanted == "free pages") return free_pages();
  if (wanted == "out of the step") return pages_of_the_step(true);
  if (wanted == "into the step") return pages_of_the_step(false);
  if (wanted == "parked") return parked();
  if (wanted == "asked by many") return asked_by_many();
  return wanted == "teardown" ? teardown() : -1;
}
