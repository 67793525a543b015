"""What is kept of answers so that later requests can refer to them: bounded in bytes and in age, apart by tenant.

`bounded` is the store, `entry` what is in it, and `memory` how the API uses one: its own, or by `shared` one that all
ingress replicas share.

Never writes anything to a disk, and knows nothing of what an item says: items are JSON that was checked elsewhere.
"""
