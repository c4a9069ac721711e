"""The kit's checks: public functions of a `device`, of a `case`, or of a `trial`, whose memory is
compared after it. `kvpool.testing.run` finds and runs them.
"""
