// What is listened to, as PCM16 chunks: a microphone, the sound of a tab or of the machine, or both in one.

import { stepFor } from "./decimator.js";
import { shareSound } from "./tab-sound.js";

// Choices beside the microphones.
export const TAB = "tab";
export const TAB_AND_MICROPHONE = "tab+microphone";

export async function listMicrophones() {
  if (!navigator.mediaDevices) return [];
  const devices = await navigator.mediaDevices.enumerateDevices();
  return devices.filter((device) => device.kind === "audioinput" && device.deviceId);
}

export class Microphone {
  // A live source cannot wait for the server; what cannot be sent is kept for a while.
  live = true;
  paused = false;

  // `choice` is a device, TAB or TAB_AND_MICROPHONE. `onChunk(Int16Array)` for each piece of sound, `onEnd()` if the
  // device goes away by itself.
  constructor(choice, onChunk, onEnd) {
    Object.assign(this, { choice, onChunk, onEnd });
    this.streams = [];
  }

  async open() {
    if (!navigator.mediaDevices) throw new DOMException("needs https", "SecurityError");
    // A browser that gets longer pieces to work on drops fewer of them on a busy machine; it costs a few milliseconds.
    this.context = new AudioContext({ latencyHint: "playback" });
    const module = this.context.audioWorklet.addModule(new URL("recorder-worklet.js", import.meta.url));
    module.catch(() => {}); // said below, if nothing else is wrong
    // Sharing needs a click just before it, so it comes first.
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
    // Speech models learn with noise around; what is left after suppression is stranger to them.
    return navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1, noiseSuppression: false, ...device } });
  }

  // Sound flows from here on; several streams into one node are added up.
  async start() {
    for (const stream of this.streams) this.context.createMediaStreamSource(stream).connect(this.node);
    await this.context.resume();
  }

  // A context that the machine has put to sleep is asked to go on. One that is closed is not: the last text may come later.
  wake() {
    if (this.context.state !== "closed") this.context.resume();
  }

  // The device stays open and silent. A second of silence lets the server end the turn under way.
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
