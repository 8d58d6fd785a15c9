"""The load generator of `tickertape bench`, for any server with the OpenAI Realtime API; independent of our engine.

It runs in the process of the command and in the client processes that it starts. Clients play speech in real time, on
an absolute schedule. Every event of the server is recorded as it arrives, and all figures are computed from that record
afterwards. The measurements of the documentation are in `benchmarks/`.
"""
