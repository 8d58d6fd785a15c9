// Captures the sound of a browser tab or of the whole machine as a media stream, in browsers that can share sound.

// Only browsers that share sound have this constraint; others share pictures only.
export function canShareSound() {
  const { mediaDevices } = navigator;
  return Boolean(mediaDevices?.getDisplayMedia && mediaDevices.getSupportedConstraints().suppressLocalAudioPlayback);
}

// Browsers share sound only together with a picture, so the picture is requested and stopped at once.
export async function shareSound() {
  const shared = await navigator.mediaDevices.getDisplayMedia({
    video: true,
    audio: { echoCancellation: false, noiseSuppression: false, autoGainControl: false },
    systemAudio: "include",
  });
  for (const track of shared.getVideoTracks()) track.stop();
  if (!shared.getAudioTracks().length) throw new DOMException("no sound was shared", "NoSoundError");
  return shared;
}
