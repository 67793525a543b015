"""What each step computes: the requests, their queues, their memory, and the plan of a step.

Start with `scheduler` (queues and state) and `planner` (one step's plan, which changes nothing). `chunk_policy` ends a
prompt's chunk; `waiting`, `tenant_shares` and `deadlines` order requests; `reservation`, `forecast` and
`answer_lengths` keep memory for answers; `block_manager` hands out KV blocks; `step_time` predicts how long a step
takes. `resources` has the contract of what else a request may hold while it runs; `state_slots` and `encoder_cache`
implement it. `request` has what every request has, and `request_parts` what few have.

Pure Python: no torch.
"""
