"""Speculative decoding (Leviathan et al. 2023): a drafter guesses a sequence's next tokens, and one step of the
model checks them all.

Every place of a draft is drawn from as if its turn had come: with the request's own parameters and the random
bits of that place (seed, index of the output token, vocabulary id). A guess is taken while it is what was
drawn, so the output is that of plain decoding, token for token, whatever was guessed; greedy or sampled.
Rejection sampling would take a random draft more often, but only keeps the distribution, not a seed's text.
"""
