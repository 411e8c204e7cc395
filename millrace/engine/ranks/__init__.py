"""One model over several ranks: the first decides and draws, the others carry out the same turns.

The first rank's engine is the ordinary one, with a journal that sends every turn, and what the one before
it brought, to the others. A follower has an executor and a runner, and neither decider, sampler nor clock.
"""
