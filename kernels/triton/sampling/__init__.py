"""From logits to token ids, without a copy to the host.

`rows` packs what each row asks for, and `sampler` launches the rest in order: `controls` changes logits, `scan` looks
at all of them once, `filter` keeps what top-k, top-p and min-p can leave, and `sample` takes one of these. `logprobs`
reports. `numbers` has masses and random numbers.
"""
