// The microphone as a source of PCM16 chunks.

import { stepFor } from "./decimator.js";

export async function listMicrophones() {
  if (!navigator.mediaDevices) return [];
  const devices = await navigator.mediaDevices.enumerateDevices();
  return devices.filter((device) => device.kind === "audioinput" && device.deviceId);
}

export class Microphone {
  // A live source cannot wait for the server; what cannot be sent is kept for a while.
  live = true;

  // `onChunk(Int16Array)` for each piece of sound, `onEnd()` if the device goes away by itself.
  constructor(deviceId, onChunk, onEnd) {
    this.deviceId = deviceId;
    this.onChunk = onChunk;
    this.onEnd = onEnd;
  }

  async open() {
    if (!navigator.mediaDevices) throw new DOMException("needs https", "SecurityError");
    const device = this.deviceId ? { deviceId: { exact: this.deviceId } } : {};
    // Speech models learn with noise around; what is left after suppression is stranger to them.
    const audio = { channelCount: 1, noiseSuppression: false, ...device };
    // A browser that gets longer pieces to work on drops fewer of them on a busy machine; it costs a few milliseconds.
    this.context = new AudioContext({ latencyHint: "playback" });
    const module = this.context.audioWorklet.addModule(new URL("recorder-worklet.js", import.meta.url));
    module.catch(() => {}); // said below, if nothing else is wrong
    this.stream = await navigator.mediaDevices.getUserMedia({ audio });
    this.stream.getAudioTracks()[0].addEventListener("ended", () => this.onEnd());
    await module;
    this.rate = this.context.sampleRate / stepFor(this.context.sampleRate);
    this.node = new AudioWorkletNode(this.context, "recorder", { numberOfOutputs: 0 });
    this.node.port.onmessage = ({ data }) => this.onChunk(data);
  }

  // Sound flows from here on.
  async start() {
    this.context.createMediaStreamSource(this.stream).connect(this.node);
    await this.context.resume();
  }

  async close() {
    this.stream?.getTracks().forEach((track) => track.stop());
    if (this.node) this.node.port.onmessage = null;
    if (this.context && this.context.state !== "closed") await this.context.close();
  }
}
