// How the work of one attention call is dealt to the members of a team. Integers only; every member computes the same deal for itself.
//
// A tile is some tokens of one sequence with heads of one kv head. Tiles stand in a line, by rows, then heads; each is a run of segments with a cost (blocks
// times rows, plus what loading a block costs). The line is cut at equal costs between segments, so a member has whole tiles and at most two that others share.
// No result depends on the cuts.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "../ops.h"

namespace pyserve::attention_deal {

constexpr int64_t key_block = 64, segment_blocks = 4, max_rows = 48;
constexpr int64_t load_cost = 5;  // what reading a block of K and V costs, in rows

struct Item {  // segments [first_segment, end_segment) of one tile
  int64_t row, num_tokens, first_head, num_heads;
  int64_t first_segment, end_segment;
  int64_t slot;  // of the workspace, where the members that share the tile meet; -1: nobody else has a part
};

struct Deal {
  const StepRows& rows;
  int64_t num_heads, group, window, num_members;
  int64_t tile_heads, tile_tokens, num_slots;
  int64_t total = 0, max_segments = 0;

  Deal(int64_t num_heads, int64_t num_kv_heads, int64_t window, const StepRows& rows, int num_members)
      : rows(rows), num_heads(num_heads), group(num_heads / num_kv_heads), window(window), num_members(num_members), num_slots(num_members - 1) {
    tile_heads = std::min(group, max_rows);
    tile_tokens = max_rows / tile_heads;
    const int64_t tiles_per_row = num_kv_heads * ((group + tile_heads - 1) / tile_heads);
    for (int64_t row = 0; row < rows.num_rows;) {
      const Tokens tokens = tokens_from(row);
      total += tokens.cost() * tiles_per_row;
      max_segments = std::max(max_segments, tokens.last_block / segment_blocks + 1);
      row += tokens.count;
    }
  }

  int64_t max_tile_rows() const { return tile_heads * std::min(tile_tokens, rows.num_rows); }

  // Appends what is member `index`'s, in the order in which memory is read.
  void collect(int64_t index, std::vector<Item>& items) const {
    int64_t before = 0;
    for (int64_t row = 0; row < rows.num_rows;) {
      const Tokens tokens = tokens_from(row);
      for (int64_t head = 0; head < num_heads;) {
        const int64_t end = std::min(head + tile_heads, (head / group + 1) * group);
        if (is_before(index, before, tokens)) return;
        if (!is_after(index, before, tokens)) add(index, before, tokens, Item{row, tokens.count, head, end - head, 0, 0, -1}, items);
        before += tokens.cost();
        head = end;
      }
      row += tokens.count;
    }
  }

 private:
  struct Tokens {  // of one tile
    int64_t count, first_block, last_block, block_cost;
    int64_t cost() const { return (last_block - first_block + 1) * block_cost; }
    int64_t first_segment() const { return first_block / segment_blocks; }
    int64_t last_segment() const { return last_block / segment_blocks; }
    int64_t cost_before(int64_t segment) const { return (std::clamp(segment * segment_blocks, first_block, last_block + 1) - first_block) * block_cost; }
    int64_t middle(int64_t segment) const { return (cost_before(segment) + cost_before(segment + 1)) / 2; }
  };

  // Those of the tile that starts at `row`: neighbours of one sequence.
  Tokens tokens_from(int64_t row) const {
    int64_t end = row + 1;
    while (end < rows.num_rows && end - row < tile_tokens && rows.sequences[end] == rows.sequences[row]) ++end;
    const int64_t first = window > 0 ? std::max<int64_t>(0, rows.positions[row] - window + 1) : 0;
    return {end - row, first / key_block, rows.positions[end - 1] / key_block, (end - row) * tile_heads + load_cost};
  }

  // A segment is its middle's member's.
  int64_t member_of(int64_t middle) const { return middle * num_members / total; }
  bool is_before(int64_t index, int64_t before, const Tokens& tokens) const {
    return (before + tokens.middle(tokens.first_segment())) * num_members >= total * (index + 1);
  }
  bool is_after(int64_t index, int64_t before, const Tokens& tokens) const {
    return (before + tokens.middle(tokens.last_segment())) * num_members < total * index;
  }

  void add(int64_t index, int64_t before, const Tokens& tokens, Item item, std::vector<Item>& items) const {
    const int64_t first = tokens.first_segment(), last = tokens.last_segment();
    item.first_segment = first;
    while (member_of(before + tokens.middle(item.first_segment)) < index) ++item.first_segment;
    item.end_segment = item.first_segment;
    while (item.end_segment <= last && member_of(before + tokens.middle(item.end_segment)) == index) ++item.end_segment;
    if (item.first_segment == item.end_segment) return;
    // Only one tile that starts with a member can go on with the next, so its first member's number is a slot of its own.
    if (item.first_segment > first || item.end_segment <= last) item.slot = member_of(before + tokens.middle(first));
    items.push_back(item);
  }
};

}  // namespace pyserve::attention_deal
