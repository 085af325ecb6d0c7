// A decoder layer, run by whoever has all its rows or some of them.
#pragma once
#include "variant.h"

namespace OCTAVO_NS {

constexpr int kMostGroups = 64;

// From row to row of what a product reads: an odd number of cache lines. Rows a power of two apart would all fall on
// few of the cache's sets, and throw each other out.
inline int64_t apart(int64_t width) { return ((width + 15) / 16 | 1) * 16; }

// Of a group of rows that goes through the layers beside others: its queries see what some of the groups
// before it write in the same layer.
struct Turn {
  octavo::Progress *written;  // [groups] layers whose keys and values are in the cache
  uint64_t waits;             // a bit for each group that this one waits for
  int group, layer;

  void wrote() const {
    octavo::reach(written[group], layer + 1);
    for (int i = 0; i < group; ++i)
      if (waits >> i & 1) octavo::wait_for(written[i], layer + 1);
  }
};

// Whether a step's tails, if it has some, are rows of its sequences.
bool tails_fit(const octavo_layer_step &step);

// turn: null for the one that has all rows. last: nothing comes after it, so that of x only step.tails are made.
int run_layer(const octavo_layer &l, const octavo_layer_step &step, float *x, const Turn *turn, bool last);

}  // namespace OCTAVO_NS
