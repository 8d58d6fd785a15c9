"""The gateway, which connects clients to engines, and the `tickertape` command line.

`app` builds a server from all packages, and `cli` is the command line. The layers from bottom to top: session; dialects
and metrics; serving; http; `app`; workers; commands. Apart from these, `webrtc` is the process of a WebRTC call, and
`client` and `bench` are clients of a server.
"""
