"""The kit's checks, by what they are of; `kvpool.testing.run` finds and runs them.

A check is a public function of a `device`, of a `case`, or of a `trial`, whose memory is compared
after it.
"""
