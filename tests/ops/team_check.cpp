// What Python cannot provoke: members that throw. Prints "good", or the first line that is wrong.
#include "cpu/team.h"

#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

using pyserve::Share;
using pyserve::Team;

#define CHECK(condition)                                   \
  if (!(condition)) {                                      \
    std::printf("line %d: %s\n", __LINE__, #condition);    \
    return 1;                                              \
  }

// Each member adds up what all wrote in the round before: right only if every barrier holds.
bool counts_right(Team& team, int num_rounds) {
  const int count = team.num_threads();
  std::vector<std::vector<long>> written(2, std::vector<long>(static_cast<size_t>(count), 1));
  team.run([&](Share share) {
    for (int round = 0; round < num_rounds; ++round) {
      long sum = 0;
      for (long value : written[round % 2]) sum += value;
      written[(round + 1) % 2][static_cast<size_t>(share.index)] = sum % 1000003;
      team.barrier();
    }
  });
  long wanted = 1;
  for (int round = 0; round < num_rounds; ++round) wanted = wanted * count % 1000003;
  for (long value : written[num_rounds % 2]) {
    if (value != wanted) return false;
  }
  return true;
}

std::string failure_of(Team& team, int culprit, int round) {
  try {
    team.run([&](Share share) {
      for (int i = 0; i < 100; ++i) {
        if (share.index == culprit && i == round) throw std::runtime_error("member " + std::to_string(culprit));
        team.barrier();
      }
    });
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

int main() {
  for (int num_threads : {1, 2, 3, 8}) {
    Team team(num_threads);
    CHECK(counts_right(team, 200));
    for (int culprit = 0; culprit < num_threads; ++culprit) {
      CHECK(failure_of(team, culprit, culprit * 7 % 100) == "member " + std::to_string(culprit));
      CHECK(counts_right(team, 50));  // a team that failed works on
    }
    for (int i = 0; i < 200; ++i) CHECK(counts_right(team, 1));
  }
  bool is_refused = false;
  try {
    Team none(0);
  } catch (const std::invalid_argument&) {
    is_refused = true;
  }
  CHECK(is_refused);
  std::puts("good");
  return 0;
}
