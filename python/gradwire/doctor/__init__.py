"""Says before a training job what would slow it down or stop it: on one host, and between all ranks.

    host      what the engine gets from this kernel, which interfaces it uses and why, the clock
    meeting   where ranks find each other's facts
    reach     at which addresses two ranks would meet
    probe     a UDP socket on the job's own port that answers the others and asks them
    pairs     what is measured between two ranks, and what follows from it

Nothing here needs torch but the meeting over a torch Store. It sends a few MB and changes nothing.
"""
