/** What the kernel sends, as the page sees it. */

export interface Model {
  get(name: string): any;
  set(name: string, value: unknown): void;
  save_changes(): void;
  on(event: string, callback: (...args: any[]) => void): void;
  off(event: string, callback: (...args: any[]) => void): void;
  send(content: unknown): void;
  /** JupyterLab's, in its pages. */
  widget_manager?: any;
}

export interface Row {
  id: string;
  vector: string;
  operation: "add" | "cap" | "ablate";
  layers: number[];
  scale: number;
  min: number | null;
  max: number | null;
  muted: boolean;
  /** Dose of scale 1, the mean over the layers; null while the residual's norm is not known. */
  unit: number | null;
  /** Dose of an addition: the mean over its layers, and at each of them. */
  dose: number | null;
  doses: number[] | null;
  /** Raw scale at each layer. */
  scales: number[];
  /** Layer to a factor on the raw scale, where that differs. */
  factors: Record<string, number>;
  /** Ends of a cap's slider. */
  range: [number, number] | null;
  /** Tokens that a cap moves, and of how many. */
  clipped: [number, number] | null;
}

export interface Packed {
  shape: number[];
  data: DataView;
}

export interface Band {
  message: number;
  role: string;
  start: number;
  end: number;
}

export interface Message {
  role: string;
  content: string;
}

export interface Answer {
  number: number;
  messages: Message[];
  text: string;
  finish: string | null;
  prompt: number;
  first: number;
  ids: number[];
  texts: string[];
  /** The answer's text before `first`, if it began there. */
  head: string;
  bands: Band[];
  /** Positions of special tokens that the messages' own texts spell. */
  special: number[];
  layers: number[];
  direction: string | null;
  norm: Packed | null;
  projection: Packed | null;
}

/** Numbers of an answer, unpacked: [layer][token]. */
export interface Numbers {
  first: number;
  count: number;
  layers: number[];
  norm: Float32Array[];
  projection: Float32Array[] | null;
  sinks: boolean[][];
}

export interface Receipt {
  number: number;
  text: string;
  code: string;
}

export interface Turn {
  user: string;
  baseline: string | null;
  steered: string | null;
  /** By side, in words, with which values an answer was made. */
  made: Partial<Record<string, string>>;
}

export interface Run {
  number: number;
  status: "idle" | "waiting" | "running" | "done" | "stopped" | "failed";
  sides?: string[];
  error?: string;
  receipt?: Receipt;
}

export interface View {
  layers: number[];
  direction: string | null;
  plot: string;
  pinned: { side: string; position: number } | null;
}
