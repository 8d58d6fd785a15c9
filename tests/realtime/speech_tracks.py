"""Speech tracks for tests of the gateway: what an engine would tell of these probabilities."""

from __future__ import annotations

from engine.messages import Speech, TurnScored
from engine.server.speech_track import DECISIONS, SpeechTrack


def judge(track: SpeechTrack, speech: Speech) -> Speech:
    """Add the events of the track, as the engine does. The track hears the frames that it has not heard."""
    frame = speech.frame_samples
    known = max(0, -(-(track.sample - speech.sample) // frame)) if speech.sample < track.sample else 0
    if speech.sample > track.sample:
        track.add_frames([0.0], speech.sample - track.sample)
    found = track.add_frames(speech.probabilities[known:], frame)
    events = [event for event in found if not isinstance(event, DECISIONS)]
    for event in events:
        if isinstance(event, TurnScored):
            # Any answer that depends on the audio alone.
            event.probability = event.sample * 7919 % 1009 / 1009
    return Speech(speech.stream, speech.sample, frame, speech.probabilities, events, track.state, track.take_spoken())
