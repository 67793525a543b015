"""One engine over several ranks: the leader's model, the followers that compute their parts of it, and their start.

Never schedules: a follower computes what the leader's plan says, and samples nothing.
"""
