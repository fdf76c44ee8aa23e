#include <algorithm>
#include <utility>

#include "program.h"

namespace pyserve::cuda {

namespace {

constexpr int64_t kSamplerBytes = 36;   // of a row: three int64, three float
constexpr int64_t kUsualChanges = 100;  // of a row's logits: a window of 64 tokens, and biases

}  // namespace

// --- memory that grows with the steps

int64_t Program::decode_scratch_bytes(int64_t num_rows, int64_t context_len) const {
  int64_t num_bytes = 0;
  for (const int64_t window : windows_)
    num_bytes = std::max(num_bytes, pyserve_cuda_attention_decode_scratch_bytes(num_rows, shape_->num_heads, shape_->num_kv_heads, shape_->head_dim, context_len,
                                                                                window, &device_->limits()));
  return num_bytes;
}

int64_t Program::prefill_scratch_bytes(int64_t num_tiles) const {
  return shape_ ? pyserve_cuda_attention_prefill_scratch_bytes(num_tiles, shape_->num_kv_heads, shape_->head_dim, &device_->limits()) : 0;
}

int64_t Program::max_tiles() const {  // every sequence may leave one tile unfilled
  return shape_ ? max_tokens_ * (shape_->num_heads / shape_->num_kv_heads) / tile_queries_ + expected_sequences_ : 0;
}

// For the largest steps that are expected: decode steps padded to a size, and prompts.
Program::Room Program::expected_room() const {
  if (expected_sequences_ == 0) return {};
  const Size size = largest_size(expected_sequences_, expected_pages_);
  const Layout decode = layout_of(size.num_rows, size.num_rows, size.table_width, size.num_rows, 0);
  const Layout prompt = layout_of(max_tokens_, expected_sequences_, expected_pages_, max_samples_, 3 * max_tiles());
  const int64_t changes_bytes = kUsualChanges * static_cast<int64_t>(sizeof(LogitChange));
  return {std::max(decode.end, prompt.end) * 4, decode_scratch_bytes(size.num_rows, size.table_width * expected_page_size_),
          prefill_scratch_bytes(max_tiles()), expected_sequences_ * (kSamplerBytes + changes_bytes)};
}

void Program::make_room(const Room& room) {
  decode_scratch_.need(room.decode_scratch);
  prefill_scratch_.need(room.prefill_scratch);
  inputs_.need(room.inputs);
  samplers_.need(room.samplers);
  for (Memory& memory : staging_) memory.need(room.inputs);
  for (Memory& memory : samplers_on_host_) memory.need(room.samplers);
}

void Program::grow(Memory& memory, int64_t num_bytes) {
  if (num_bytes <= memory.num_bytes()) return;
  device_->finish_step();
  graphs_.forget();
  memory.need(num_bytes);
}

void Program::prepare_scratch(const Step& step) {
  if (!shape_) return;
  int64_t num_bytes = 0;
  for (const Range& range : step.alone) num_bytes = std::max(num_bytes, decode_scratch_bytes(range.count, step.rows.page_table_width * step.pool.page_size));
  grow(decode_scratch_, num_bytes);
  grow(prefill_scratch_, prefill_scratch_bytes(step.num_tiles));
}

// --- the batch as the device sees it

void Program::cut_attention(const Batch& batch, Step& step, std::vector<int32_t>& tiles) const {
  const StepRows& rows = batch.rows;
  std::vector<int32_t> chunks;
  for (int64_t first = 0, next; first < rows.num_rows; first = next) {
    for (next = first + 1; next < rows.num_rows && rows.sequences[next] == rows.sequences[first];) ++next;
    if (next - first > 1) {
      for (const int64_t value : {first, next - first, int64_t{rows.positions[next - 1]}}) chunks.push_back(static_cast<int32_t>(value));
    } else if (!step.alone.empty() && step.alone.back().first + step.alone.back().count == first) {
      ++step.alone.back().count;
    } else {
      step.alone.push_back({first, 1});
    }
  }
  if (chunks.empty()) return;
  const auto cut = [&](int32_t* to, int64_t room) {
    return pyserve_cuda_attention_prefill_tiles(chunks.data(), static_cast<int64_t>(chunks.size()) / 3, shape_->num_heads / shape_->num_kv_heads, tile_queries_,
                                                to, room);
  };
  step.num_tiles = cut(nullptr, 0);
  tiles.resize(static_cast<size_t>(3 * step.num_tiles));
  cut(tiles.data(), step.num_tiles);
}

int32_t* Program::staging(const Layout& layout) {
  Memory& memory = staging_[num_launched_ % 2];
  memory.need(layout.end * 4);  // its last step has been collected
  grow(inputs_, layout.end * 4);
  return memory.as<int32_t>();
}

void Program::send(const Layout& layout, Step& step) {
  must(pyserve_cuda_copy(inputs_.as<void>(), staging_[num_launched_ % 2].as<void>(), layout.end * 4, 0, step.stream), "uploading the batch");
  int32_t* base = inputs_.as<int32_t>();
  step.tokens = base + layout.tokens;
  step.rows.positions = base + layout.positions;
  step.rows.sequences = base + layout.sequences;
  step.rows.page_table = base + layout.page_table;
  step.sample_rows = base + layout.sample_rows;
  step.tiles = base + layout.tiles;
}

Program::Step Program::place(const Batch& batch, const Pool& pool) {
  Step step{};
  step.stream = device_->compute();
  step.pool = pool;
  step.rows = batch.rows;
  step.num_samples = batch.num_samples;
  std::vector<int32_t> tiles;
  if (shape_) cut_attention(batch, step, tiles);
  step.rows.page_table_width = shape_ ? used_table_width(batch, pool.page_size) : 0;
  prepare_scratch(step);
  const Layout layout = layout_of(batch.rows.num_rows, batch.num_sequences, step.rows.page_table_width, batch.num_samples, static_cast<int64_t>(tiles.size()));
  write_step(batch, layout, step.rows.page_table_width, tiles, staging(layout));
  send(layout, step);
  return step;
}

Program::Step Program::place_decode(const Batch& batch, const Pool& pool, const Size& size) {
  Step step{};
  step.stream = device_->compute();
  step.pool = pool;
  step.rows.num_rows = step.num_samples = size.num_rows;
  step.rows.page_table_width = size.table_width;
  step.alone = {{0, size.num_rows}};
  prepare_scratch(step);
  const Layout layout = layout_of(size.num_rows, size.num_rows, size.table_width, size.num_rows, 0);
  write_decode_step(batch, layout, size, staging(layout));
  send(layout, step);
  return step;
}

// --- launching

void Program::attend(Step& step, const Register& from, const Register& to, const AttentionSpec& spec) {
  constexpr auto f32 = static_cast<int64_t>(DType::f32);
  if (step.pool.type == DType::f32) {
    const Matrix q{from.data.f32, f32, from.width}, out{to.data.f32, f32, to.width};
    must(pyserve_cuda_attention_f32(&q, &spec, &step.pool, &step.rows, &out, step.stream), "attention");
    return;
  }
  for (const Range& range : step.alone) {
    const Matrix q{from.data.f32 + range.first * from.width, f32, from.width}, out{to.data.f32 + range.first * to.width, f32, to.width};
    StepRows rows = step.rows;
    rows.num_rows = range.count;
    rows.positions += range.first;
    rows.sequences += range.first;
    const bool is_planned = step.alone.size() == 1 && step.planned_window == spec.window;
    const auto decode = is_planned ? pyserve_cuda_attention_decode_planned : pyserve_cuda_attention_decode;
    must(decode(&q, &spec, &step.pool, &rows, &out, decode_scratch_.as<void>(), decode_scratch_.num_bytes(), &device_->limits(), step.stream), "attention");
    step.planned_window = spec.window;
  }
  if (step.num_tiles == 0) return;
  const Matrix q{from.data.f32, f32, from.width}, out{to.data.f32, f32, to.width};
  must(pyserve_cuda_attention_prefill(&q, &spec, &step.pool, &step.rows, &out, step.tiles, step.num_tiles, prefill_scratch_.as<void>(),
                                      prefill_scratch_.num_bytes(), &device_->limits(), step.stream),
       "attention of a prompt");
}

// Everything of a step that lies between its inputs and its results. The recording thread calls it too: it changes nothing of the program.
void Program::execute(Step step, bool is_picking) {
  for (const Instruction& instruction : instructions_) {
    const int64_t num_rows = instruction.is_on_samples ? step.num_samples : step.rows.num_rows;
    if (num_rows > 0) instruction.launch(step, num_rows);
  }
  if (!is_picking) return;
  const Activations& logits = this->logits().data;
  must(pyserve_cuda_argmax(logits.f32, logits.width, logits.width, step.num_samples, picked_.as<int32_t>(), step.stream), "argmax");
}

void Program::launch(const Batch& batch, const Pool& pool, bool is_picking, bool follows) {
  check(is_uploaded_, "the program is not complete: set_logits and upload must come before run");
  check_step(batch, pool, !follows);
  device_->use();
  if (std::exchange(pool_, pool.data) != pool.data) {  // graphs hold its address
    device_->finish_step();
    graphs_.forget();
  }
  const std::optional<Size> size = shape_ && are_graphs_used_ ? decode_size(batch, pool.page_size, max_samples_) : std::nullopt;
  Step step = size ? place_decode(batch, pool, *size) : place(batch, pool);
  if (follows) must(pyserve_cuda_follow(step.tokens, batch.rows.num_rows, picked_.as<int32_t>(), step.stream), "the tokens of the step before");
  void* graph = nullptr;
  if (size) {
    const auto record = [=, this](void* stream) {
      Step recorded = step;
      recorded.stream = stream;
      execute(recorded, is_picking);
    };
    graph = graphs_.find({size->num_rows, size->table_width, is_picking}, record);
    step.rows.num_rows = step.num_samples = step.alone[0].count = batch.rows.num_rows;  // without a graph, the real rows alone
  }
  if (graph == nullptr) {
    execute(std::move(step), is_picking);
  } else {
    must(pyserve_cuda_graph_launch(graph, step.stream), "launching the step");
  }
  ++num_launched_;
}

const float* Program::launch_and_read(const Batch& batch, const Pool& pool, bool follows) {
  const int64_t num_bytes = batch.num_samples * (is_complete() ? logits_width() : 0) * 4;
  if (num_bytes > logits_on_host_.num_bytes()) device_->finish_step();
  logits_on_host_.need(num_bytes);
  launch(batch, pool, false, follows);
  if (num_bytes > 0) must(pyserve_cuda_copy(logits_on_host_.as<void>(), logits().data.f32, num_bytes, 1, device_->compute()), "reading logits back");
  return logits_on_host_.as<float>();
}

const int32_t* Program::launch_and_pick(const Batch& batch, const Pool& pool, bool follows) {
  launch(batch, pool, true, follows);
  return read_picked(batch.num_samples);
}

const int32_t* Program::read_picked(int64_t num_samples) {
  Memory& picked = picked_on_host_[(num_launched_ - 1) % 2];
  if (num_samples > 0) must(pyserve_cuda_copy(picked.as<void>(), picked_.as<void>(), num_samples * 4, 1, device_->compute()), "reading tokens back");
  return picked.as<int32_t>();
}

// Behind the step launched last: its samplers go to the device in one copy, bans and penalties change its logits, tokens are drawn.
void Program::draw(const Samplers& samplers, int64_t num_samples) {
  const int64_t whole_bytes = num_samples * 24, changes_at = num_samples * kSamplerBytes;
  const int64_t num_changes = static_cast<int64_t>(samplers.changes.size()), num_bytes = changes_at + num_changes * static_cast<int64_t>(sizeof(LogitChange));
  Memory& staging = samplers_on_host_[(num_launched_ - 1) % 2];
  staging.need(num_bytes);  // its last step has been collected
  if (num_bytes > samplers_.num_bytes()) device_->finish_step();
  samplers_.need(num_bytes);
  uint8_t* to = staging.as<uint8_t>();
  std::copy_n(samplers.whole, num_samples * 3, staging.as<int64_t>());
  std::copy_n(samplers.real, num_samples * 3, reinterpret_cast<float*>(to + whole_bytes));
  std::copy_n(samplers.changes.data(), num_changes, reinterpret_cast<LogitChange*>(to + changes_at));
  void* stream = device_->compute();
  must(pyserve_cuda_copy(samplers_.as<void>(), staging.as<void>(), num_bytes, 0, stream), "uploading the samplers");
  const uint8_t* there = samplers_.as<uint8_t>();
  const Activations& logits = this->logits().data;
  must(pyserve_cuda_change_logits(logits.f32, logits.width, reinterpret_cast<const LogitChange*>(there + changes_at), num_changes,
                                  picked_.as<int32_t>(), stream),
       "changing logits");
  must(pyserve_cuda_draw(logits.f32, logits.width, logits.width, reinterpret_cast<const float*>(there + whole_bytes),
                         reinterpret_cast<const int64_t*>(there), num_samples, picked_.as<int32_t>(), stream),
       "sampling");
}

const float* Program::post(const Batch& batch, const Pool& pool, bool follows) {
  const auto lock = lock_running();
  return launch_and_read(batch, pool, follows);
}

const int32_t* Program::post_greedy(const Batch& batch, const Pool& pool, bool follows) {
  const auto lock = lock_running();
  return launch_and_pick(batch, pool, follows);
}

const int32_t* Program::post_drawn(const Batch& batch, const Pool& pool, bool follows, const Samplers& samplers) {
  const auto lock = lock_running();
  launch(batch, pool, false, follows);
  draw(samplers, batch.num_samples);
  return read_picked(batch.num_samples);
}

const float* Program::run(const Batch& batch, const Pool& pool) {
  const auto lock = lock_running();
  device_->use();
  device_->finish_step();  // of whoever posted: its results are no longer wanted
  const float* logits = launch_and_read(batch, pool, false);
  device_->finish_step();
  return logits;
}

const int32_t* Program::run_greedy(const Batch& batch, const Pool& pool) {
  const auto lock = lock_running();
  device_->use();
  device_->finish_step();
  const int32_t* picked = launch_and_pick(batch, pool, false);
  device_->finish_step();
  return picked;
}

void Program::use_graphs(bool are_used) {
  const auto lock = lock_running();
  are_graphs_used_ = are_used;
}

}  // namespace pyserve::cuda
