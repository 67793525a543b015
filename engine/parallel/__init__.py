"""Several ranks: parts of one engine that compute what its leader plans, or engines that share a mixture's experts.

Never schedules: a follower computes what the leader's plan says, and engines in lockstep plan for themselves.
"""
