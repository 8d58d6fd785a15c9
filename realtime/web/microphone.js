// A live source of PCM16 chunks: a microphone, the shared sound of a tab or of the machine, or both mixed.

import { stepFor } from "./decimator.js";
import { shareSound } from "./tab-sound.js";

// Choices besides the ids of microphones.
export const TAB = "tab";
export const TAB_AND_MICROPHONE = "tab+microphone";

export async function listMicrophones() {
  if (!navigator.mediaDevices) return [];
  const devices = await navigator.mediaDevices.enumerateDevices();
  return devices.filter((device) => device.kind === "audioinput" && device.deviceId);
}

export class Microphone {
  // A live source cannot wait for the server: samples that cannot be sent yet are buffered.
  live = true;
  paused = false;

  // `choice` is the id of a device (empty: the default), TAB or TAB_AND_MICROPHONE. `onChunk(Int16Array)` is called for
  // each chunk, `onEnd()` if the device is removed or the sharing ended.
  constructor(choice, onChunk, onEnd) {
    Object.assign(this, { choice, onChunk, onEnd });
    this.streams = [];
  }

  async open() {
    if (!navigator.mediaDevices) throw new DOMException("needs https", "SecurityError");
    // With `playback` the browser processes larger blocks, and so drops fewer on a busy machine, for some milliseconds
    // of latency.
    this.context = new AudioContext({ latencyHint: "playback" });
    const module = this.context.audioWorklet.addModule(new URL("recorder-worklet.js", import.meta.url));
    module.catch(() => {}); // reported below, unless opening a device fails first
    // Browsers allow sharing only right after a click, so it is requested first.
    if (this.choice === TAB || this.choice === TAB_AND_MICROPHONE) this.streams.push(await shareSound());
    if (this.choice !== TAB) this.streams.push(await this.#microphone());
    for (const stream of this.streams) stream.getAudioTracks()[0].addEventListener("ended", () => this.onEnd());
    await module.catch(({ message }) => {
      throw new DOMException(message, "NoRecorderError");
    });
    this.rate = this.context.sampleRate / stepFor(this.context.sampleRate);
    this.node = new AudioWorkletNode(this.context, "recorder", { numberOfOutputs: 0 });
    this.node.port.onmessage = ({ data }) => this.paused || this.onChunk(data);
  }

  #microphone() {
    const chosen = this.choice && this.choice !== TAB_AND_MICROPHONE;
    const device = chosen ? { deviceId: { exact: this.choice } } : {};
    // Speech models are trained with noise; the artefacts of noise suppression harm them more.
    return navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1, noiseSuppression: false, ...device } });
  }

  // Begins to record; a node adds up all streams that are connected to it.
  async start() {
    for (const stream of this.streams) this.context.createMediaStreamSource(stream).connect(this.node);
    await this.context.resume();
  }

  // Resumes an audio context that the system has suspended. It may be closed already, while the last text is awaited.
  wake() {
    if (this.context.state !== "closed") this.context.resume();
  }

  // The device stays open. One second of silence is sent, so that the server ends the current turn.
  pause() {
    this.onChunk(new Int16Array(this.rate));
    this.#enable(false);
  }

  resume() {
    this.#enable(true);
  }

  #enable(on) {
    this.paused = !on;
    for (const stream of this.streams) stream.getAudioTracks().forEach((track) => (track.enabled = on));
  }

  async close() {
    for (const stream of this.streams) stream.getTracks().forEach((track) => track.stop());
    if (this.node) this.node.port.onmessage = null;
    if (this.context && this.context.state !== "closed") await this.context.close();
  }
}
