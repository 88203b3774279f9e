// Meshes in WebGL. One context draws all of them, because browsers allow only a few contexts; each
// mesh has a canvas of its own, into which its picture is copied. All meshes of a group turn together.

import { h, onRemoved } from "./dom.js";

// The vertices and polygons of an OBJ file, scaled to fit into a unit sphere.
export function parseObj(text) {
  const vertices = [];
  const faces = [];
  for (const line of text.split("\n")) {
    const [kind, ...values] = line.trim().split(/\s+/);
    if (kind === "v") vertices.push(values.slice(0, 3).map(Number));
    else if (kind === "f") faces.push(values.map((value) => parseInt(value, 10) - 1));
  }
  const used = faces.flat().map((index) => vertices[index]).filter(Boolean);
  const low = [0, 1, 2].map((axis) => used.reduce((low, vertex) => Math.min(low, vertex[axis]), Infinity));
  const high = [0, 1, 2].map((axis) => used.reduce((high, vertex) => Math.max(high, vertex[axis]), -Infinity));
  const centre = low.map((value, axis) => (value + high[axis]) / 2);
  const radius = Math.hypot(...low.map((value, axis) => high[axis] - value)) / 2 || 1;
  const scaled = vertices.map((vertex) => vertex.map((value, axis) => (value - centre[axis]) / radius));
  return { vertices: scaled, faces: faces.filter((face) => face.every((index) => scaled[index])) };
}

function triangles({ vertices, faces }) {
  const positions = [];
  const normals = [];
  for (const face of faces) {
    for (let i = 1; i + 1 < face.length; i++) {
      const [a, b, c] = [face[0], face[i], face[i + 1]].map((index) => vertices[index]);
      const [u, v] = [b, c].map((corner) => corner.map((value, axis) => value - a[axis]));
      const normal = [u[1] * v[2] - u[2] * v[1], u[2] * v[0] - u[0] * v[2], u[0] * v[1] - u[1] * v[0]];
      const length = Math.hypot(...normal) || 1;
      for (const corner of [a, b, c]) {
        positions.push(...corner);
        normals.push(...normal.map((value) => value / length));
      }
    }
  }
  return { positions: new Float32Array(positions), normals: new Float32Array(normals) };
}

function edges({ vertices, faces }) {
  const lines = [];
  for (const face of faces) {
    face.forEach((index, i) => lines.push(...vertices[index], ...vertices[face[(i + 1) % face.length]]));
  }
  return new Float32Array(lines);
}

const VERTEX = `
attribute vec3 position; attribute vec3 normal; uniform mat3 rotation; uniform float bias;
varying vec3 turned;
void main() {
  vec3 p = rotation * position;
  turned = rotation * normal;
  float depth = 3.2 - p.z;
  gl_Position = vec4(p.xy * 3.0, (depth - 2.1 - bias) / 2.2 * 2.0 * depth - depth, depth);
}`;
const FRAGMENT = `
precision mediump float; varying vec3 turned; uniform vec3 colour; uniform float shade;
void main() {
  vec3 n = normalize(turned + vec3(0.0, 0.0, 1e-5));
  float light = 0.45 + 0.55 * abs(dot(n, normalize(vec3(0.4, 0.6, 0.8))));
  gl_FragColor = vec4(colour * mix(1.0, light, shade), 1.0);
}`;

let shared = null;

function renderer() {
  if (shared) return shared;
  const canvas = document.createElement("canvas");
  const gl = canvas.getContext("webgl", { antialias: true, alpha: true, preserveDrawingBuffer: true });
  if (!gl) return null;
  const program = gl.createProgram();
  for (const [type, code] of [[gl.VERTEX_SHADER, VERTEX], [gl.FRAGMENT_SHADER, FRAGMENT]]) {
    const shader = gl.createShader(type);
    gl.shaderSource(shader, code);
    gl.compileShader(shader);
    gl.attachShader(program, shader);
  }
  gl.linkProgram(program);
  gl.useProgram(program);
  gl.enable(gl.DEPTH_TEST);
  const location = (name) => gl.getUniformLocation(program, name);
  shared = {
    canvas,
    gl,
    position: gl.getAttribLocation(program, "position"),
    normal: gl.getAttribLocation(program, "normal"),
    uniforms: Object.fromEntries(["rotation", "bias", "colour", "shade"].map((name) => [name, location(name)])),
  };
  return shared;
}

function upload(gl, data) {
  const buffer = gl.createBuffer();
  gl.bindBuffer(gl.ARRAY_BUFFER, buffer);
  gl.bufferData(gl.ARRAY_BUFFER, data, gl.STATIC_DRAW);
  return { buffer, count: data.length / 3 };
}

function rotationMatrix(yaw, pitch) {
  const [cy, sy, cp, sp] = [Math.cos(yaw), Math.sin(yaw), Math.cos(pitch), Math.sin(pitch)];
  return [cy, sp * sy, -cp * sy, 0, cp, sp, sy, -sp * cy, cp * cy];
}

function rgb(name) {
  const context = document.createElement("canvas").getContext("2d");
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const value = context.fillStyle;
  return [1, 3, 5].map((i) => parseInt(value.slice(i, i + 2), 16) / 255);
}

export class MeshGroup {
  constructor() {
    this.meshes = [];
    this.yaw = 0.6;
    this.pitch = 0.35;
    this.wireframe = false;
    this.turning = !matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.running = false;
  }

  // A canvas for the mesh of an OBJ file; text is a promise of its content.
  cell(text, size = 220) {
    const canvas = h("canvas", { class: "mesh", width: size * 2, height: size * 2, role: "img", "aria-label": "Mesh" });
    const holder = h("div", { class: "mesh-cell" }, canvas);
    Promise.resolve(text).then(
      (content) => {
        const mesh = parseObj(content);
        const tools = renderer();
        if (!tools) throw new Error("This browser has no WebGL, which meshes need.");
        if (!mesh.faces.length) throw new Error("No faces");
        const { positions, normals } = triangles(mesh);
        const buffers = [positions, normals, edges(mesh)].map((data) => upload(tools.gl, data));
        const [position, normal, lines] = buffers;
        this.meshes.push({ canvas, position, normal, lines });
        holder.append(h("span", { class: "muted" }, `${mesh.faces.length} faces`));
        this.start();
        this.drawWhenShown(canvas);
      },
    ).catch((error) => holder.replaceChildren(h("div", { class: "empty small" }, error.message)));
    this.dragWith(canvas);
    return holder;
  }

  dragWith(canvas) {
    let last = null;
    canvas.addEventListener("pointerdown", (event) => {
      last = [event.clientX, event.clientY];
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!last) return;
      this.yaw += (event.clientX - last[0]) * 0.01;
      this.pitch = Math.max(-1.5, Math.min(1.5, this.pitch + (event.clientY - last[1]) * 0.01));
      last = [event.clientX, event.clientY];
      this.turning = false;
      this.ontoggle?.();
      this.draw();
    });
    canvas.addEventListener("pointerup", () => (last = null));
  }

  start() {
    if (this.running) return;
    this.running = true;
    let before = performance.now();
    const step = (now) => {
      this.meshes = this.meshes.filter((mesh) => mesh.canvas.isConnected || !mesh.wasShown || this.free(mesh));
      if (this.meshes.length === 0 || !this.turning) {
        this.running = false;
        return;
      }
      this.yaw += (now - before) * 0.0005;
      before = now;
      this.draw();
      requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }

  // A file may arrive before its canvas is part of the page.
  drawWhenShown(canvas, attempts = 600) {
    if (canvas.isConnected) this.draw();
    else if (attempts) requestAnimationFrame(() => this.drawWhenShown(canvas, attempts - 1));
  }

  free(mesh) {
    const { gl } = renderer();
    [mesh.position, mesh.normal, mesh.lines].forEach(({ buffer }) => gl.deleteBuffer(buffer));
    return false;
  }

  setTurning(value) {
    this.turning = value;
    if (value) this.start();
  }

  draw() {
    const { gl, canvas, position, normal, uniforms } = renderer();
    const [surface, line] = [rgb("--mesh"), rgb("--text")];
    for (const mesh of this.meshes) {
      if (!mesh.canvas.isConnected) continue;
      mesh.wasShown = true;
      const { width, height } = mesh.canvas;
      if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
      gl.viewport(0, 0, width, height);
      gl.clearColor(0, 0, 0, 0);
      gl.clear(gl.COLOR_BUFFER_BIT | gl.DEPTH_BUFFER_BIT);
      gl.uniformMatrix3fv(uniforms.rotation, false, rotationMatrix(this.yaw, this.pitch));
      const bind = (location, { buffer }) => {
        gl.bindBuffer(gl.ARRAY_BUFFER, buffer);
        gl.enableVertexAttribArray(location);
        gl.vertexAttribPointer(location, 3, gl.FLOAT, false, 0, 0);
      };
      bind(position, mesh.position);
      bind(normal, mesh.normal);
      gl.uniform3fv(uniforms.colour, surface);
      gl.uniform1f(uniforms.shade, 1);
      gl.uniform1f(uniforms.bias, 0);
      if (!this.wireframe) gl.drawArrays(gl.TRIANGLES, 0, mesh.position.count);
      bind(position, mesh.lines);
      gl.disableVertexAttribArray(normal);
      gl.uniform3fv(uniforms.colour, line);
      gl.uniform1f(uniforms.shade, 0);
      gl.uniform1f(uniforms.bias, 0.01);
      gl.drawArrays(gl.LINES, 0, mesh.lines.count);
      const context = mesh.canvas.getContext("2d");
      context.clearRect(0, 0, width, height);
      context.drawImage(canvas, 0, 0);
      mesh.canvas.dataset.drawn = "true";
    }
  }

  controls() {
    const turn = h("input", { type: "checkbox", checked: this.turning });
    turn.addEventListener("change", () => this.setTurning(turn.checked));
    this.ontoggle = () => (turn.checked = this.turning);
    const wire = h("input", { type: "checkbox", checked: this.wireframe });
    wire.addEventListener("change", () => {
      this.wireframe = wire.checked;
      this.draw();
    });
    const element = h(
      "div",
      { class: "controls" },
      h("label", { class: "inline" }, turn, "Turn"),
      h("label", { class: "inline" }, wire, "Wireframe"),
    );
    onRemoved(element, () => this.setTurning(false));
    return element;
  }
}
