// The sound of a tab or of the whole machine as a stream, where a browser shares it, alone or mixed with a microphone.

// Browsers that share sound have a say in whether it goes on being played; others share pictures only.
export function canShareSound() {
  const { mediaDevices } = navigator;
  return Boolean(mediaDevices?.getDisplayMedia && mediaDevices.getSupportedConstraints().suppressLocalAudioPlayback);
}

// Browsers offer sound only together with a picture, which is not used here.
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
