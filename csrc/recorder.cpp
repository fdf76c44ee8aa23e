#include "recorder.h"

#include <algorithm>
#include <string>

#include "check.h"

namespace pyserve {
namespace {

int64_t qkv_width(const AttentionShape& shape) { return (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim; }

}  // namespace

Recorder::Recorder(int64_t max_tokens, int64_t max_samples) : max_tokens_(max_tokens), max_samples_(max_samples) {
  check(max_tokens > 0 && max_tokens <= INT32_MAX, "max_tokens must be positive, not ", max_tokens);
  check(max_samples > 0 && max_samples <= max_tokens, "max_samples must be in 1..max_tokens, not ", max_samples);
}

// --- instructions

int64_t Recorder::buffer(int64_t width) {
  check_open();
  check(width > 0, "width must be positive, not ", width);
  const auto index = static_cast<int64_t>(registers_.size());
  registers_.push_back({index, width});
  registers_.back().data.width = width;
  return index;
}

void Recorder::embed(const PackedWeight& table, int64_t out, float scale) {
  const Register& to = writable(out, "out", table.cols, false);
  vocab_size_ = std::min(vocab_size_, table.rows);
  check(!is_on_samples_, "embed must come before take_rows");
  add_embed(table, to, scale);
}

void Recorder::rms_norm(int64_t x, const float* weight, int64_t weight_len, float eps, int64_t out) {
  const Register& from = readable(x, "x");
  check_equal(weight_len, from.width, "weight: its length");
  check(eps >= 0, "eps must not be negative");
  check(x != out, "out must be another register than x");
  add_rms_norm(from, weight, eps, writable(out, "out", from.width, true));
}

void Recorder::linear(int64_t x, const std::vector<PackedWeight>& weights, const std::vector<const float*>& biases, int64_t out, bool accumulate) {
  Register& from = readable(x, "x");
  check(!weights.empty(), "weights must not be empty");
  check_equal(static_cast<int64_t>(biases.size()), static_cast<int64_t>(weights.size()), "biases: their number");
  check(x != out, "out must be another register than x");
  int64_t width = 0;
  bool reads_q8 = false;
  for (const PackedWeight& weight : weights) {
    check_equal(weight.cols, from.width, "weights: the columns of each");
    width += weight.rows;
    reads_q8 = reads_q8 || is_quantised(weight.type);
  }
  if (reads_q8) need_q8(from);
  if (accumulate) readable(out, "out");
  add_linear(from, weights, biases, writable(out, "out", width, false), accumulate);
}

void Recorder::rope_kv_write(int64_t qkv, const AttentionShape& shape, const RopeTable& rope, const HeadNorm& norm) {
  readable(qkv, "qkv");
  note_shape(shape);
  const Register& to = writable(qkv, "qkv", qkv_width(shape), false);
  check(rope.rotary_dim > 0 && rope.rotary_dim % 2 == 0 && rope.rotary_dim <= shape.head_dim, "rope: rotary_dim must be even and in 2..", shape.head_dim,
        ", not ", rope.rotary_dim);
  check(rope.max_positions > 0, "rope: the tables must have a row for each position");
  max_positions_ = std::min(max_positions_, rope.max_positions);
  add_rope_kv_write(to, shape, rope, norm);
}

void Recorder::attention(int64_t qkv, int64_t out, const AttentionShape& shape, float scale, int64_t window, float softcap) {
  const Register& from = readable(qkv, "qkv");
  note_shape(shape);
  check_equal(from.width, qkv_width(shape), "qkv: its width");
  check(window >= 0, "window must not be negative");
  check(softcap >= 0, "softcap must not be negative");
  check(qkv != out, "out must be another register than qkv");
  const Register& to = writable(out, "out", shape.num_heads * shape.head_dim, attention_fills_q8(shape.head_dim));
  add_attention(from, to, {shape.num_heads, shape.layer, scale, softcap, window});
}

void Recorder::gated_activation(int64_t gate_up, int64_t out, Activation kind) {
  const Register& from = readable(gate_up, "gate_up");
  check(gate_up != out, "out must be another register than gate_up");
  check(from.width % 2 == 0, "gate_up: its width must be even, not ", from.width);
  add_gated_activation(from, writable(out, "out", from.width / 2, true), kind);
}

void Recorder::take_rows(int64_t x, int64_t out) {
  const Register& from = readable(x, "x");
  check(!is_on_samples_, "take_rows may come once only");
  check(x != out, "out must be another register than x");
  is_on_samples_ = true;
  add_take_rows(from, writable(out, "out", from.width, false));
}

void Recorder::set_logits(int64_t x) {
  readable(x, "logits");
  check(is_on_samples_, "logits must hold sample rows: take_rows must come before");
  complete();
  logits_ = x;
}

// --- registers

void Recorder::check_open() const { check(!is_complete(), "the program is complete: nothing may follow set_logits"); }

Recorder::Register& Recorder::reg(int64_t index, const char* name) {
  check_open();
  check(index >= 0 && index < static_cast<int64_t>(registers_.size()), name, " is no register of this program");
  return registers_[static_cast<size_t>(index)];
}

Recorder::Register& Recorder::readable(int64_t index, const char* name) {
  Register& found = reg(index, name);
  check(found.rows != Rows::none, name, " is read before anything wrote it");
  check((found.rows == Rows::samples) == is_on_samples_, name, " holds token rows: after take_rows only sample rows can be read");
  return found;
}

Recorder::Register& Recorder::writable(int64_t index, const char* name, int64_t width, bool fills_q8) {
  Register& found = reg(index, name);
  check_equal(found.width, width, (std::string(name) + ": its width").c_str());
  found.rows = is_on_samples_ ? Rows::samples : Rows::tokens;
  found.holds_tokens = found.holds_tokens || !is_on_samples_;
  found.has_q8 = fills_q8;
  return found;
}

void Recorder::need_q8(Register& x) {
  check(x.width % q8_block == 0, "x: its width must be a multiple of ", q8_block, " for a quantised product, not ", x.width);
  x.needs_q8 = true;
  if (!x.has_q8) add_quantise(x);
  x.has_q8 = true;
}

void Recorder::note_shape(const AttentionShape& shape) {
  check(!is_on_samples_, "attention must come before take_rows");
  check_attention_shape(shape);
  check_device_shape(shape);
  if (shape_) {
    check_equal(shape.num_kv_heads, shape_->num_kv_heads, "num_kv_heads");
    check_equal(shape.head_dim, shape_->head_dim, "head_dim");
  }
  shape_ = shape;
  num_layers_ = std::max(num_layers_, shape.layer + 1);
}

// --- running

void Recorder::check_step(const Batch& batch, const Pool& pool, bool are_tokens_known) const {
  if (shape_) {
    check(pool.num_layers >= num_layers_, "kv: must have ", num_layers_, " layers, not ", pool.num_layers);
    check_equal(pool.num_kv_heads, shape_->num_kv_heads, "kv: its kv heads");
    check_equal(pool.head_dim, shape_->head_dim, "kv: its head_dim");
    check(pool.page_size > 0 && pool.num_pages > 0, "kv: must not be empty");
  }
  check(batch.rows.num_rows > 0 && batch.rows.num_rows <= max_tokens_, "tokens: their number must be in 1..", max_tokens_, ", not ", batch.rows.num_rows);
  check(batch.num_samples >= 0 && batch.num_samples <= max_samples_, "sample_rows: their number must be in 0..", max_samples_, ", not ", batch.num_samples);
  for (int64_t i = 0; i < batch.rows.num_rows; ++i) {
    const int32_t token = batch.tokens[i];
    check(token < vocab_size_ && (token >= 0 || !are_tokens_known), "tokens[", i, "] is ", token, ": must be in 0..", vocab_size_ - 1);
  }
  check_range(batch.sample_rows, batch.num_samples, batch.rows.num_rows, "sample_rows");
  if (shape_) check_step_rows(batch.rows, batch.num_sequences, max_positions_, pool);
}

std::unique_lock<std::mutex> Recorder::lock_running() {
  std::unique_lock<std::mutex> lock(running_, std::try_to_lock);
  check(lock.owns_lock(), "the program is running: one run at a time");
  return lock;
}

}  // namespace pyserve
