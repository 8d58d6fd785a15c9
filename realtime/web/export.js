// Writes the finished turns as files: text, SubRip, WebVTT and JSON.
//
// Subtitles are cut by the same rules as the server's (realtime/session/words.py). Speakers are named if there are two
// or more.

import { speakerName } from "./transcript.js";

const MAX_CAPTION_CHARACTERS = 84;
const MAX_CAPTION_SECONDS = 6;
export const SENTENCE_END = /[.?!…。？！]$/u;

export const FORMATS = {
  txt: { type: "text/plain", write: toText },
  srt: { type: "application/x-subrip", write: toSrt },
  vtt: { type: "text/vtt", write: toVtt },
  json: { type: "application/json", write: toJson },
};

export function toText(transcript) {
  if (!hasSpeakers(transcript)) return transcript.finished.map((turn) => `${turn.text.trim()}\n`).join("");
  const lines = [];
  for (const { speaker, text } of subtitles(transcript)) {
    if (lines.length && lines.at(-1).speaker === speaker) lines.at(-1).text += ` ${text}`;
    else lines.push({ speaker, text });
  }
  return lines.map(({ speaker, text }) => `${spokenBy(speaker)}${text}\n`).join("");
}

export function toSrt(transcript) {
  const blocks = subtitles(transcript).map(
    ({ start, end, text, speaker }, index) =>
      `${index + 1}\n${stamp(start, ",")} --> ${stamp(end, ",")}\n${hasSpeakers(transcript) ? spokenBy(speaker) : ""}${text}\n`,
  );
  return blocks.join("\n");
}

export function toVtt(transcript) {
  const blocks = subtitles(transcript).map(
    ({ start, end, text, speaker }) =>
      `${stamp(start, ".")} --> ${stamp(end, ".")}\n${hasSpeakers(transcript) ? voiceTag(speaker) : ""}${escapeCue(text)}\n`,
  );
  return `WEBVTT\n\n${blocks.join("\n")}`;
}

export function toJson(transcript) {
  const turns = transcript.finished.map(({ start, end, text, heard, words, state }) => ({
    start: round(start),
    end: round(end),
    text: text.trim(),
    ...(heard !== undefined && { heard: heard.trim() }),
    complete: state === "done",
    words: words.map((word) => ({ ...word, start: round(word.start), end: round(word.end) })),
  }));
  const notes = transcript.entries.filter((entry) => entry.state === "note");
  const name = transcript.name ? { name: transcript.name } : {};
  return `${JSON.stringify({ ...name, turns, notes: notes.map(({ start, text }) => ({ at: round(start), text })) }, null, 2)}\n`;
}

function hasSpeakers(transcript) {
  return transcript.voices.size > 1;
}

function spokenBy(speaker) {
  return speaker ? `${speakerName(speaker)}: ` : "";
}

function voiceTag(speaker) {
  return speaker ? `<v ${escapeCue(speakerName(speaker))}>` : "";
}

function subtitles(transcript) {
  return transcript.finished.flatMap((turn) =>
    turn.words.length ? cutTurn(turn.words.filter(({ word }) => word)) : [{ start: turn.start, end: turn.end, text: turn.text.trim() }],
  );
}

function cutTurn(words) {
  const lines = [];
  let line = [];
  let length = 0;
  const finish = () => {
    if (line.length) {
      const text = line.map(({ word }) => word).join(" ");
      lines.push({ start: line[0].start, end: line.at(-1).end, text, speaker: line[0].speaker });
    }
    line = [];
    length = 0;
  };
  for (const word of words) {
    const tooLong = length + word.word.length + 1 > MAX_CAPTION_CHARACTERS;
    const otherSpeaker = line.length && word.speaker !== line[0].speaker;
    if (line.length && (tooLong || otherSpeaker || word.end - line[0].start > MAX_CAPTION_SECONDS)) finish();
    line.push(word);
    length += word.word.length + 1;
    if (SENTENCE_END.test(word.word)) finish();
  }
  finish();
  return lines;
}

function stamp(seconds, separator) {
  const total = Math.round(seconds * 1000);
  const pad = (number, width) => String(number).padStart(width, "0");
  const [hours, minutes, rest] = [Math.floor(total / 3.6e6), Math.floor(total / 6e4) % 60, Math.floor(total / 1e3) % 60];
  return `${pad(hours, 2)}:${pad(minutes, 2)}:${pad(rest, 2)}${separator}${pad(total % 1000, 3)}`;
}

function escapeCue(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function round(seconds) {
  return Math.round(seconds * 1000) / 1000;
}

export function download(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  // Once the download has begun, it no longer needs the URL.
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
