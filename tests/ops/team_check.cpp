// What Python cannot provoke: members that throw. Prints "good", or the first line that is wrong.
#include "cpu/team.h"

#include <atomic>
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

// Waits until every member has come so far.
struct Rounds {
  Team& team;
  std::atomic<int> num_arrivals{0};
  void end(int round) {
    num_arrivals.fetch_add(1);
    team.wake();
    team.wait([&] { return num_arrivals.load() >= (round + 1) * team.num_threads(); });
  }
};

// Each member adds up what all wrote in the round before: right only if every wait holds.
bool counts_right(Team& team, int num_rounds) {
  const int count = team.num_threads();
  Rounds rounds{team};
  std::vector<std::vector<long>> written(2, std::vector<long>(static_cast<size_t>(count), 1));
  team.run([&](Share share) {
    for (int round = 0; round < num_rounds; ++round) {
      long sum = 0;
      for (long value : written[round % 2]) sum += value;
      written[(round + 1) % 2][static_cast<size_t>(share.index)] = sum % 1000003;
      rounds.end(round);
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
  Rounds rounds{team};
  try {
    team.run([&](Share share) {
      for (int i = 0; i < 100; ++i) {
        if (share.index == culprit && i == round) throw std::runtime_error("member " + std::to_string(culprit));
        rounds.end(i);
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
