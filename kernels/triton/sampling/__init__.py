"""Turns logits into token ids, without a copy to the host.

`rows` packs each row's parameters, and `sampler` launches the rest in order: `controls` changes logits, `scan` reads
all of them once, `filter` keeps what top-k, top-p and min-p can leave, and `sample` takes one of these. `logprobs`
reports log-probabilities. `numbers` has masses and random numbers.
"""
