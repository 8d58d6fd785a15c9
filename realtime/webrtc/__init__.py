"""The process of a WebRTC call: ICE, DTLS, SRTP, a data channel and Opus, with aiortc.

It does not run in the gateway: each call has a process of its own, and only these processes load aiortc. The gateway's
side is `realtime/serving/webrtc_calls.py`.
"""
